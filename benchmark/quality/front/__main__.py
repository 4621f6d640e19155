"""What `own_share` and squared utilities save: `python -m benchmark.quality.front [POLICY...]`.

Published settings, decoded in mixed batches of several sizes, token by token and in verification of a chain of drafts a
request, and the same ones with `own_share` 0.75 and, where a budget goes by utility, with squared ones.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmark.common.command import Parser, policy, positive, run_main
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding, add_decoding, read_decoding
from benchmark.quality.front.ladders import POLICIES, changes_of, family_of, ladder_of, settings_of, swept_of
from benchmark.quality.front.report import tabulate_front, tabulate_own_share
from benchmark.quality.measure import Bench, Decoded, compare_loss
from benchmark.quality.model import Layout, router_of

COUNTS = ("per_domain", "prompt", "steps")
BATCHES, TOKENS = (4, 16, 64), (1, 4)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the tables."""
    parser = Parser("benchmark.quality.front", __doc__)
    help = "settings as published (default: ladders of each policy, for the model's number of experts)"
    parser.add_argument("policies", nargs="*", type=policy, help=help)
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=BATCHES, help="requests of a step (default: 4 16 64)"
    )
    help = "tokens of a request in a step; above 1, drafts are verified (default: 1 4)"
    parser.add_argument("--tokens-per-request", nargs="+", type=positive, default=TOKENS, help=help)
    add_decoding(parser, COUNTS, steps=64)
    parser.add_record(BUILD / "quality" / "front")
    args = parser.parse_args(argv)
    for setting in args.policies:
        if family_of(setting) not in POLICIES:
            parser.error(f"policy {setting}: allowed are settings of {', '.join(POLICIES)}")
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    layouts = [Layout(*both) for both in product(sorted(args.batch, reverse=True), args.tokens_per_request)]
    record = parser.open_record("front", args, argv)
    model, sequences = decoding.load()
    router, num_experts = router_of(model)
    missing: dict[Layout, dict[str, dict[str, str]]] = {}
    for layout in layouts:  # the fewest steps first
        settings = args.policies or settings_of(num_experts, layout)
        swept = swept_of(num_experts, layout)
        missing[layout] = {
            setting: dict(changes_of(setting, setting in swept))
            for setting in settings
            if _name(layout, setting) not in record
        }
        _check(layout, decoding, len(sequences))
        for text in (text for changes in missing[layout].values() for text in changes.values()):
            parse_plan(text).check(router, num_experts)
    bench = Bench(model, sequences.take(sequences.mixing()), decoding.prompt)
    for layout, changed in missing.items():
        for setting, point in measure(bench, layout, changed):
            record.add(_name(layout, setting), **point)
    tabulate_front(record.points).show()
    tabulate_own_share(record.points, models=[decoding.model.name]).show()
    print(f"Record: {record.path}")


def _check(layout: Layout, decoding: Decoding, sequences: int) -> None:
    """Raise ValueError for a layout that does not fit the text."""
    if sequences % layout.batch:
        raise ValueError(f"--batch {layout.batch}: allowed are divisors of the {sequences} sequences")
    if decoding.steps % layout.tokens_per_request:
        tokens = f"--tokens-per-request {layout.tokens_per_request}"
        raise ValueError(f"{tokens}: allowed are divisors of --steps {decoding.steps}")


def measure(bench: Bench, layout: Layout, settings: dict[str, dict[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(setting, point) in turn, for each setting's changes by name.

    A point has the layout, vanilla's active experts, and of each change the policy, its active experts, and its loss
    above vanilla's and above the published setting's, `delta` and `error` of `Loss`.
    """
    if not settings:
        return
    vanilla = bench.run(parse_plan(BASELINE), layout)
    start = {"batch": layout.batch, "tokens_per_request": layout.tokens_per_request}
    for setting, changes in settings.items():
        found: dict[str, Any] = {}
        published = None
        for name, text in changes.items():
            decoded = bench.run(parse_plan(text, layout.rows), layout)
            published = published or decoded
            found[name] = {"policy": text, **_summarize(decoded, vanilla, published)}
            loss = compare_loss(decoded.nats, vanilla.nats)
            print(f"{layout}, {text}: {decoded.active:.1f} experts, {loss} nats", flush=True)
        point = {"ladder": ladder_of(setting), "setting": setting, "vanilla_active": vanilla.active, "changes": found}
        yield setting, start | point


def _summarize(decoded: Decoded, vanilla: Decoded, published: Decoded) -> dict[str, Any]:
    return {
        "active_experts": decoded.active,
        "loss": _excess(decoded, vanilla),
        "over_published": _excess(decoded, published),
    }


def _excess(decoded: Decoded, other: Decoded) -> dict[str, float]:
    loss = compare_loss(decoded.nats, other.nats)
    return {"delta": loss.delta, "error": loss.error}


def _name(layout: Layout, setting: str) -> str:
    return f"{layout}, {setting}"


if __name__ == "__main__":
    run_main("front", main)
