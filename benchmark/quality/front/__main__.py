"""What `own_share` and squared utilities save: `python -m benchmark.quality.front [POLICY...]`.

Published settings, decoded in mixed batches of several sizes, and the same ones with `own_share` 0.75 and, where a
budget goes by utility, with squared ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from benchmark.common.command import Parser, one_line_errors, policy, positive
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.front.ladders import LADDERS, SETTINGS, changes_of, family_of
from benchmark.quality.front.report import plot_front, tabulate_front, tabulate_own_share
from benchmark.quality.measure import Bench, compare_loss
from benchmark.quality.model import Layout, router_of

COUNTS = ("per_domain", "prompt", "steps")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the tables, write the plot."""
    parser = Parser("benchmark.quality.front", __doc__)
    help = f"settings as published (default: {' '.join(SETTINGS)})"
    parser.add_argument("policies", nargs="*", type=policy, default=SETTINGS, help=help)
    parser.add_argument("--batches", nargs="+", type=positive, default=[4, 16, 64], help="(default: 4 16 64)")
    add_decoding(parser, COUNTS)
    parser.add_record(BUILD / "quality" / "front")
    args = parser.parse_args(argv)
    for setting in args.policies:
        if family_of(setting) not in LADDERS:
            parser.error(f"policy {setting}: allowed are settings of {', '.join(LADDERS)}")
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    record = parser.open_record("front", args, argv)
    missing = {batch: [one for one in args.policies if _name(batch, one) not in record] for batch in args.batches}
    if any(missing.values()):
        model, sequences = decoding.load()
        _check(missing, model, len(sequences))
        bench = Bench(model, sequences.take(sequences.mixing()), decoding.prompt)
        for batch in sorted(missing, reverse=True):  # the fewest steps first
            for setting, point in measure(bench, batch, missing[batch]):
                record.add(_name(batch, setting), **point)
    tabulate_front(record.points).show()
    tabulate_own_share(record.points).show()
    plot_front(args.out / "front.png", record.points, f"Loss over active experts: {decoding.model.name}")
    print(f"Record: {record.path}, plot: {args.out / 'front.png'}")


def _check(settings: dict[int, list[str]], model: PreTrainedModel, sequences: int) -> None:
    """Raise ValueError before anything is measured: for a batch size, or for a policy."""
    for batch, some in settings.items():
        if sequences % batch:
            raise ValueError(f"--batches {batch}: allowed are divisors of the {sequences} sequences")
        for setting in some:
            for text in changes_of(setting, batch).values():
                parse_plan(text).check(*router_of(model))


def measure(bench: Bench, batch: int, settings: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(setting, point) in turn: the batch size, vanilla's active experts, and of each change of the setting the policy,
    its active experts and kept mass, and its loss above vanilla's and above the published one's, fields of `Loss`.
    """
    layout = Layout(batch)
    if not settings:
        return
    vanilla = bench.run(parse_plan(BASELINE), layout)
    for setting in settings:
        changes: dict[str, Any] = {}
        published = None
        for name, text in changes_of(setting, batch).items():
            decoded = bench.run(parse_plan(text), layout)
            published = published or decoded
            loss = compare_loss(decoded.nats, vanilla.nats)
            changes[name] = {
                "policy": text,
                "active_experts": decoded.active,
                "kept_mass": decoded.kept_mass,
                "loss": asdict(loss),
                "over_published": asdict(compare_loss(decoded.nats, published.nats)),
            }
            print(f"batch {batch}, {text}: {decoded.active:.1f} experts, {loss} mnats", flush=True)
        yield setting, {"batch": batch, "setting": setting, "vanilla_active": vanilla.active, "changes": changes}


def _name(batch: int, setting: str) -> str:
    return f"batch {batch}, {setting}"


if __name__ == "__main__":
    with one_line_errors("front"):
        main()
