"""What selection costs where some drafts are wrong: `python -m benchmark.quality.drafts`.

Settings of XShare, plain and with drafts weighed by their chance, in simulated verification of mixed domains.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmark.common.command import Parser, one_line_errors, positive
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding, add_decoding, read_decoding
from benchmark.quality.drafts.layout import Drafted
from benchmark.quality.drafts.report import KINDS, TOLD, tabulate_drafts
from benchmark.quality.measure import Bench, compare_loss
from benchmark.quality.model import router_of

COUNTS = ("per_domain", "prompt", "steps")
SETTING = "xshare:k0=1,utility=squared,own_share=0.75,add={}"
ADDS = (4, 8, 12, 16, 24)
BATCHES, TOKENS, CHANCES = (1, 4), (8, 16), (0.75, 0.5, 0.9)


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
    shapes = product(args.chance, args.batch, args.tokens_per_request)
    layouts = [Drafted(batch, tokens, chance) for chance, batch, tokens in shapes]
    record = parser.open_record("drafts", args, argv)
    for layout in layouts:
        measure(decoding, layout, args.add, record)
    tabulate_drafts(record.points).show(record.path)


def measure(decoding: Decoding, layout: Drafted, adds: Sequence[int], record: Any) -> None:
    """Add what the record lacks of a layout. Raises ValueError for one that does not fit the text."""
    if layout.tokens_per_request > decoding.steps:
        allowed = f"allowed is at most --steps {decoding.steps}"
        raise ValueError(f"--tokens-per-request {layout.tokens_per_request}: {allowed}")
    missing = {
        f"{layout}, {kind}, add={add}": (kind, add)
        for kind, add in product(KINDS, adds)
        if f"{layout}, {kind}, add={add}" not in record
    }
    if not missing:
        return
    model, sequences = decoding.load()
    bench = Bench(model, sequences.take(sequences.mixing()), decoding.prompt)
    counted = layout.count(len(sequences), decoding.steps)
    vanilla = bench.run(parse_plan(BASELINE), layout)
    for name, (kind, add) in missing.items():
        policy = SETTING.format(add) + KINDS[kind]
        plan = parse_plan(policy, speculative=True)
        plan.check(*router_of(model))
        decoded = bench.run(plan, replace(layout, told=kind == TOLD))
        loss = compare_loss(decoded.nats, vanilla.nats, counted)
        print(f"{name}: {decoded.active:.1f} experts, {loss} nats", flush=True)
        record.add(
            name,
            batch=layout.batch,
            tokens_per_request=layout.tokens_per_request,
            chance=layout.chance,
            kind=kind,
            policy=policy,
            vanilla_active=vanilla.active,
            active_experts=decoded.active,
            loss={"delta": loss.delta, "error": loss.error},
        )


def _spell(numbers: Sequence[float]) -> str:
    return " ".join(map(str, numbers))


if __name__ == "__main__":
    with one_line_errors("drafts"):
        main()
