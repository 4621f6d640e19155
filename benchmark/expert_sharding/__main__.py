"""Expert sharding against expert parallelism, MoEShard's study (section 4): `python -m benchmark.expert_sharding`.

Varies skew, experts and batch, each about the same middle, on ranks that are processes on cores of their own.
"""

from collections.abc import Sequence

from benchmark.common.command import Parser, positive, run_main
from benchmark.common.paths import BUILD
from benchmark.expert_sharding.ranks import Encoder, SkewedRouter, measure
from benchmark.expert_sharding.report import tabulate_sharding
from sglang_xshare.parser import LARGEST, between

MIDDLE = {"alpha": 0.6, "experts": 128, "batch": 100}
"""The paper's, but for the batch, which is 250 there."""
SKEWED = 10
"""One in so many experts is drawn more often: the paper's k_r."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table."""
    parser = Parser("benchmark.expert_sharding", __doc__)
    swept, skew = "(default: %(default)s)", between(0, LARGEST)
    parser.add_argument("--alpha", nargs="*", type=skew, default=[0.0, 0.1, 0.6, 2.0], help=f"skews {swept}")
    parser.add_argument("--experts", nargs="*", type=positive, default=[8, 32, 128, 256], help=f"experts {swept}")
    parser.add_argument("--batch", nargs="*", type=positive, default=[10, 50, 100, 250], help=f"sequences {swept}")
    parser.add_count("ranks", 2, "ranks")
    parser.add_count("rounds", 5, "rounds, in which the layouts take turns")
    parser.add_count("layers", 2, "layers of the encoder")
    parser.add_count("sequence", 120, "rows of a sequence")
    parser.add_count("hidden", 256, "width of a row")
    parser.add_count("width", 1024, "width of an expert, in the paper four times that of a row")
    parser.add_count("top_k", 1, "experts of a row")
    parser.add_record(BUILD / "expert-sharding")
    args = parser.parse_args(argv)
    shape = {name: value for name, value in vars(args).items() if name not in (*MIDDLE, "out", "resume")}
    record = parser.open_record("expert-sharding", args, argv)
    for name in MIDDLE:
        for value in getattr(args, name):
            at = {**MIDDLE, name: value}
            key = f"alpha {at['alpha']:g}, {at['experts']} experts, batch {at['batch']}"
            if key in record:
                continue
            print(key, flush=True)
            router = SkewedRouter(at["experts"], at["alpha"], max(at["experts"] // SKEWED, 1), args.top_k)
            encoder = Encoder(router, at["batch"], args.sequence, args.layers, args.hidden, args.width)
            record.add(key, **at, shape=shape, layouts=measure(encoder, args.ranks, args.rounds))
    if record.points:
        tabulate_sharding(record.points).show(record.path)


if __name__ == "__main__":
    run_main("expert_sharding", main)
