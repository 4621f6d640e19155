"""Compare expert sharding with expert parallelism, as in section 4 of MoEShard: `python -m benchmark.expert_sharding`.

Varies the skew of the router, the number of experts and the batch size, one at a time. Each rank is a process on its
own core.
"""

from collections.abc import Sequence
from typing import Any

from benchmark.common.command import Parser, positive, run_main
from benchmark.common.paths import BUILD
from benchmark.expert_sharding.ranks import COUNTS, Encoder, Router, skew, sweep
from benchmark.expert_sharding.report import tabulate_sharding
from sglang_xshare.parser import LARGEST, between

MIDDLE = {"alpha": 0.6, "experts": 128, "batch": 100}
"""The values that stay fixed while another one varies. They are the paper's values, except that its batch is 250."""
SKEWED = 10
"""One in every `SKEWED` experts is drawn more often than the others. The paper calls this number k_r."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.expert_sharding", __doc__)
    swept, skews = "(default: %(default)s)", between(0, LARGEST)
    parser.add_argument("--alpha", nargs="*", type=skews, default=[0.0, 0.1, 0.6, 2.0], help=f"skews {swept}")
    parser.add_argument("--experts", nargs="*", type=positive, default=[8, 32, 128, 256], help=f"experts {swept}")
    parser.add_argument("--batch", nargs="*", type=positive, default=[10, 50, 100, 250], help=f"sequences {swept}")
    parser.add_counts(COUNTS)
    parser.add_record(BUILD / "expert-sharding")
    args = parser.parse_args(argv)
    shape = {name: getattr(args, name) for name in COUNTS}
    cases: dict[str, tuple[Encoder, dict[str, Any]]] = {}
    for name in MIDDLE:
        for value in getattr(args, name):
            at = {**MIDDLE, name: value}
            router = Router(skew(at["experts"], max(at["experts"] // SKEWED, 1), at["alpha"]), args.top_k)
            encoder = Encoder(router, at["batch"], args.sequence, args.layers, args.hidden, args.width)
            key = f"alpha {at['alpha']:g}, {at['experts']} experts, batch {at['batch']}"
            cases[key] = encoder, {**at, "shape": shape}
    record = parser.open_record("expert-sharding", args, argv)
    sweep(record, cases, args.ranks, args.rounds)
    if record.points:
        tabulate_sharding(record.points).show(record.path)


if __name__ == "__main__":
    run_main("expert_sharding", main)
