"""What selection costs where some drafts are wrong: `python -m benchmark.quality.drafts`.

Settings of XShare, plain and with drafts weighed by their chance, in simulated verification of mixed domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch

from benchmark.common.command import Parser, positive, run_main
from benchmark.common.paths import BUILD
from benchmark.common.record import Record
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.drafts.layout import Drafted
from benchmark.quality.drafts.report import BY_OWN, KINDS, TOLD, tabulate_drafts
from benchmark.quality.measure import Bench, compare_loss
from benchmark.quality.model import router_of
from sglang_xshare import SelectionPlan

COUNTS = ("per_domain", "prompt", "steps")
SETTING = "xshare:k0=1,utility=squared,own_share=0.75,add={}"
ADDS = (4, 8, 12, 16, 24)
BATCHES, TOKENS, CHANCES = (1, 4), (8, 16), (0.75, 0.5, 0.9)
SPREAD = 0.25
"""Of the first chance, once more."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table."""
    parser = Parser("benchmark.quality.drafts", __doc__)
    parser.add_argument("--add", nargs="+", type=positive, default=ADDS, help=f"budgets (default: {_spell(ADDS)})")
    parser.add_argument("--batch", nargs="+", type=positive, default=BATCHES, help="requests of a step (default: 1 4)")
    help = "rows of a request in a step (default: 8 16)"
    parser.add_argument("--tokens-per-request", nargs="+", type=positive, default=TOKENS, help=help)
    help = f"that a draft is right if all before it are (default: {_spell(CHANCES)})"
    parser.add_argument("--chance", nargs="+", type=float, default=CHANCES, help=help)
    add_decoding(parser, COUNTS, per_domain=16)
    parser.add_record(BUILD / "quality" / "drafts")
    args = parser.parse_args(argv)
    for chance in args.chance:
        if not 0 < chance <= 1:
            parser.error(f"--chance {chance}: allowed is a number above 0, and not above 1")
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    first = args.chance[0]
    chances = [(first, 0.0), (first, min(SPREAD, first / 2, 1 - first)), *((chance, 0.0) for chance in args.chance[1:])]
    shapes = product(dict.fromkeys(chances), args.batch, args.tokens_per_request)
    layouts = [Drafted(batch, tokens, *chance) for chance, batch, tokens in shapes]
    plans = {text: parse_plan(text) for text in (_policy(*both) for both in product(KINDS, args.add))}
    record = parser.open_record("drafts", args, argv)
    model, sequences = decoding.load()
    router, num_experts = router_of(model)
    for plan in plans.values():
        plan.check(router, num_experts)
    bench = Bench(model, sequences.take(sequences.mixing()), decoding.prompt)
    counted = {layout: _count(layout, len(sequences), decoding.steps) for layout in layouts}
    for layout in layouts:
        measure(bench, layout, counted[layout], plans, args.add, record)
    tabulate_drafts(record.points).show(record.path)


def _count(layout: Drafted, sequences: int, steps: int) -> torch.Tensor:
    """The tokens that are emitted. Raises ValueError for a layout that does not fit the text."""
    if layout.tokens_per_request > steps:
        raise ValueError(f"--tokens-per-request {layout.tokens_per_request}: allowed is at most --steps {steps}")
    return layout.count(sequences, steps)


def measure(
    bench: Bench,
    layout: Drafted,
    counted: torch.Tensor,
    plans: Mapping[str, SelectionPlan],
    adds: Sequence[int],
    record: Record,
) -> None:
    """Add what the record lacks of a layout, in which the tokens that are `counted` are emitted."""
    names = {f"{layout}, {kind}, add={add}": (kind, add) for kind, add in product(KINDS, adds)}
    missing = {name: both for name, both in names.items() if name not in record}
    if not missing:
        return
    vanilla = bench.run(parse_plan(BASELINE), layout)
    for name, (kind, add) in missing.items():
        policy = _policy(kind, add)
        decoded = bench.run(plans[policy], replace(layout, told=kind == TOLD, own=kind == BY_OWN))
        loss = compare_loss(decoded.nats, vanilla.nats, counted)
        print(f"{name}: {decoded.active:.1f} experts, {loss} nats", flush=True)
        record.add(
            name,
            batch=layout.batch,
            tokens_per_request=layout.tokens_per_request,
            chance=layout.chance,
            spread=layout.spread,
            kind=kind,
            policy=policy,
            vanilla_active=vanilla.active,
            active_experts=decoded.active,
            loss={"delta": loss.delta, "error": loss.error},
        )


def _policy(kind: str, add: int) -> str:
    return SETTING.format(add) + KINDS[kind]


def _spell(numbers: Sequence[float]) -> str:
    return " ".join(map(str, numbers))


if __name__ == "__main__":
    run_main("drafts", main)
