"""Measure active experts on the expert-parallel ranks of a server: `python -m benchmark.balance.live [POLICY...]`.

One server of the trained checkpoint with 4 expert-parallel ranks is switched from policy to policy. Under each policy,
the server is forced to decode the same held-out text of mixed domains. The table shows the active experts of the
fullest rank, the kept mass and the loss. The first policy is the baseline. The speed is not measured, because the four
ranks share the CPU cores.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmark.common.command import Parser, run_main, selecting
from benchmark.common.evidence import read_settled_totals
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.record import Record
from benchmark.common.server import Server, bind_ranks
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, parse_variant
from benchmark.quality.measure import compare_nats
from benchmark.quality.served import SERVER_ARGS, measure_nats
from benchmark.quality.text import load_sequences

POLICIES = (
    BASELINE,
    "xshare:k0=1,add=24",
    "xshare:k0=1,add=12",
    "xshare:k0=1,target_per_rank=5",
    "xshare:k0=1,target_per_rank=5,balance=level",
    *(f"xshare:k0=1,target_per_rank={target},balance=fill" for target in (5, 7, 9)),
)
SHAPE = ("ep_size", "batch", "steps", "rounds")
COUNTS = ("layer_steps", "experts_before", "experts_after", "kept_mass", "rows")
FULLEST = ("fullest_rank_experts_before", "fullest_rank_experts_after")
NOTE = """\
{ep_size} expert-parallel ranks of {per_rank} experts each serve the trained checkpoint. {batch} requests of mixed
domains at a time decode {steps} tokens of held-out text each, by force, in {rounds} rounds in which the policies take
turns. Fullest rank: active experts of the rank with the most, which a step waits for, mean of layers and steps; in
brackets relative to the first row. Imbalance: fullest rank over mean rank. The first row's experts are those that the
model's own routing would have activated in the steps of the other rows. Loss: cross-entropy above the first row's on
the same tokens, in nats a token, ± half the 95 % t-interval over batches."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.balance.live", __doc__)
    parser.add_policies(selecting, POLICIES[1:], f"beside {BASELINE}")
    parser.add_count("ep_size", 4, "expert-parallel ranks")
    parser.add_count("rounds", 4, "rounds, one batch of text each")
    parser.add_count("batch", 16, "requests at a time")
    parser.add_count("prompt", 32, "tokens a prompt")
    parser.add_count("steps", 48, "tokens a continuation")
    parser.add_record(BUILD / "balance")
    args = parser.parse_args(argv)
    record = parser.open_record("live", args, argv)
    policies = [BASELINE, *dict.fromkeys(args.policies)]
    if any(name not in record for name in policies):
        per_domain = -(-args.batch * args.rounds // 4)
        tokens = load_sequences(TEXTS, TRAINED, args.prompt + args.steps + 1, per_domain).mix().tokens
        flags = ["--tp", str(args.ep_size), "--ep-size", str(args.ep_size), "--dtype", "float32", "--enable-metrics"]
        flags += ["--disable-radix-cache", *SERVER_ARGS, *parse_variant(policies[1]).server_args()]
        with Server(TRAINED, flags, env=bind_ranks(args.ep_size), name="ranks", deadline=900) as server:
            measure(record, server, policies, tokens.split(args.batch)[: args.rounds], args)
    tabulate_live(record.points).show(record.path)


def measure(
    record: Record, server: Server, policies: Sequence[str], batches: Sequence[torch.Tensor], args: argparse.Namespace
) -> None:
    """Decode every batch under every policy. The order of the policies is reversed in odd rounds."""
    totals = {name: dict.fromkeys((*COUNTS, *FULLEST), 0.0) for name in policies}
    nats: dict[str, list[torch.Tensor]] = {name: [] for name in policies}
    for number, batch in enumerate(batches):
        for name in policies if number % 2 == 0 else reversed(policies):
            server.post("/expert_policy", parse_variant(name).body())
            before = read_settled_totals(server)
            nats[name].append(measure_nats(server, batch, args.prompt, len(batch)))
            after = read_settled_totals(server)
            for key in totals[name]:
                totals[name][key] += after.get(key, 0.0) - before.get(key, 0.0)
        print(f"round {number + 1}/{len(batches)}", flush=True)
    shape = {name: getattr(args, name) for name in SHAPE}
    for name in policies:
        record.add(name, shape=shape, totals=totals[name], nats=torch.cat(nats[name]).mean(1).tolist())


def tabulate_live(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy."""
    (first_name, first), *others = points.items()
    shape = first["shape"]
    own = {key: sum(point["totals"][key] for _, point in others) for key in (*COUNTS, *FULLEST)}
    baseline = own["fullest_rank_experts_before"] / own["layer_steps"]
    rows = [_format(first_name, baseline, own["experts_before"] / own["layer_steps"], 1.0, "+0.0000", baseline, shape)]
    for name, point in others:
        totals = point["totals"]
        steps = totals["layer_steps"]
        loss = str(compare_nats(point, first, shape["batch"]))
        fullest, active = totals["fullest_rank_experts_after"] / steps, totals["experts_after"] / steps
        rows.append(_format(name, fullest, active, totals["kept_mass"] / totals["rows"], loss, baseline, shape))
    headings = ["policy", "fullest rank", "imbalance", "active", "kept mass", "loss, nats"]
    note = NOTE.format(**shape, per_rank=64 // shape["ep_size"])
    return Table("Experts on expert-parallel ranks, served", headings, rows, note)


def _format(
    name: str, fullest: float, active: float, kept: float, loss: str, baseline: float, shape: Mapping[str, int]
) -> list[str]:
    imbalance = fullest * shape["ep_size"] / active
    return [name, f"{fullest:.1f} ({fullest / baseline:.2f})", f"{imbalance:.2f}", f"{active:.1f}", f"{kept:.3f}", loss]


if __name__ == "__main__":
    run_main("balance.live", main)
