"""A governor against every fixed budget, on traffic that changes: `python -m benchmark.governor`.

Stretches of one domain and of all, in small and large batches, follow each other; the trained model decodes them under
each fixed budget, each fixed share of the mass, and under a governor at several floors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmark.common.command import Parser, one_line_errors
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.governor.report import plot_governor, tabulate_governor
from benchmark.governor.traffic import Replayed, Stretch, make_traffic, replay, replay_governed
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.measure import compare_loss
from sglang_xshare.policies.governor import Governor

COUNTS = ("per_domain", "prompt", "steps")
FAMILIES: dict[str, dict[str, Any]] = {
    "xshare:k0=1,add=": {"key": "add", "bounds": (1, 40), "fixed": (2, 4, 6, 8, 12, 16, 20, 24)},
    "moe-spec:budget=": {"key": "budget", "bounds": (4, 56), "fixed": (12, 16, 20, 24, 28, 32, 40, 48)},
}
"""By the spelling that a budget ends: the key that the governor moves, its bounds, and the fixed budgets."""
SHARES = {"xshare:k0=1,mass=": (0.8, 0.85, 0.9, 0.93, 0.95, 0.97)}
"""Fixed too, but a threshold that each layer and step meets with a budget of its own."""
FLOORS = (0.85, 0.9, 0.93, 0.95, 0.97)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, write the plot."""
    parser = Parser("benchmark.governor", __doc__)
    add_decoding(parser, COUNTS, prompt=32, steps=256)
    parser.add_count("every", 8, "steps a decision")
    parser.add_record(BUILD / "governor")
    args = parser.parse_args(argv)
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    record = parser.open_record("governor", args, argv)
    model, sequences = decoding.load()
    traffic = make_traffic(model, sequences, decoding.prompt)
    vanilla = replay(traffic, parse_plan(BASELINE))
    for name, family, point, replayed in measure(traffic, args.every, set(record.points)):
        loss = compare_loss(replayed.nats, vanilla.nats)
        figures = {
            "family": family,
            **point,
            "active_experts": replayed.active.mean().item(),
            "kept_mass": replayed.kept_mass.mean().item(),
            "loss": asdict(loss),
            "stretches": describe(traffic, replayed, vanilla),
        }
        record.add(name, **figures)
        print(f"{name}: {figures['active_experts']:.1f} experts, {loss} mnats", flush=True)
    tabulate_governor(record.points).show()
    plot_governor(args.out / "governor.png", record.points, f"A governor on changing traffic: {decoding.model.name}")
    print(f"Record: {record.path}, plot: {args.out / 'governor.png'}")


def measure(
    traffic: Sequence[Stretch], every: int, known: set[str]
) -> Iterator[tuple[str, str, dict[str, Any], Replayed]]:
    """(name, family, what it is, what it did) of every fixed setting and every governor that is not known yet."""
    fixed = {family: one["fixed"] for family, one in FAMILIES.items()} | SHARES
    for family, values in fixed.items():
        for value in values:
            name = f"{family}{value}"
            if name not in known:
                yield name, family, {"fixed": value}, replay(traffic, parse_plan(name))
    for family, one in FAMILIES.items():
        for floor in FLOORS:
            name = f"{family}governed at {floor}"
            if name in known:
                continue
            low, high = one["bounds"]
            governor = Governor(floor, one["key"], low, high, every)
            replayed = replay_governed(traffic, governor, family)
            assert replayed.budgets is not None
            point = {"floor": floor, "moves": replayed.moves, "budgets": replayed.budgets.tolist()}
            yield name, family, point, replayed


def describe(traffic: Sequence[Stretch], replayed: Replayed, vanilla: Replayed) -> list[dict[str, Any]]:
    """Of every stretch: what it is, its mean active experts, kept mass and loss above vanilla's, in nats a token."""
    deltas = (replayed.nats - vanilla.nats).split([one.batch for one in traffic])
    rows = zip(traffic, replayed.active, vanilla.active, replayed.kept_mass, deltas, strict=True)
    return [
        {
            "name": one.name,
            "active_experts": active.mean().item(),
            "vanilla_active": own.mean().item(),
            "kept_mass": kept.mean().item(),
            "loss": delta.mean().item(),
        }
        for one, active, own, kept, delta in rows
    ]


if __name__ == "__main__":
    with one_line_errors("governor"):
        main()
