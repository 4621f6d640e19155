"""Measure the gain of policies if some requests are exact: `python -m benchmark.serving.exact [POLICY...]`.

One server of the widened checkpoint is switched from policy to policy. It answers full batches in which some requests
are exact. Then the server decodes held-out text in the same way, to measure the loss of exact rows and of other rows.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmark.common.command import Parser, run_main, selecting
from benchmark.common.evidence import read_settled_totals
from benchmark.common.interval import format_rounds, format_spread, spread
from benchmark.common.paths import BUILD, TEXTS, WIDENED
from benchmark.common.record import Record
from benchmark.common.rounds import order_round
from benchmark.common.server import Server
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, parse_variant
from benchmark.common.widened import prepare
from benchmark.quality.instrument import Instrument
from benchmark.quality.measure import compare_loss
from benchmark.quality.served import SERVER_ARGS
from benchmark.quality.text import load_sequences
from sglang_xshare.policies.exact import EXACT, KEY

POLICIES = tuple(f"xshare:k0=1,add={add},utility=squared,own_share=0.75" for add in (12, 8))
SHAPE = ("batch", "output_tokens", "rounds", "loss_batches")
COUNTS = ("layer_steps", "experts_before", "experts_after", "kept_mass", "rows", "exact_rows")
NOTE = """\
{batch} requests at a time. Tokens/s: {output_tokens} greedy tokens each, {rounds} alternating rounds, means [95 %
t-interval]. Ratio: tokens/s over the first row's in the same round. Kept: the share of the policy's gain without exact
requests that remains in the same round: in tokens/s (ratio - 1), and in time a token (1 - 1 / ratio). The server counts
active experts of a layer and step, and the kept mass of rows that are not exact. Loss: nats a token of held-out text of
mixed domains, forced through the server's own decode steps, above the first row's: of requests that are not exact, ±
half the 95 % t-interval over batches; of exact requests, the largest difference."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the policies on one server and print the table."""
    parser = Parser("benchmark.serving.exact", __doc__)
    parser.add_policies(selecting, POLICIES, f"beside {BASELINE}")
    parser.add_argument("--exact", nargs="+", type=int, default=[0, 1, 2, 4], help="requests of a batch, 0 first")
    parser.add_count("rounds", 7, "alternating rounds")
    parser.add_count("batch", 16, "requests at a time")
    parser.add_count("output_tokens", 48, "tokens a request of the timed rounds")
    parser.add_count("loss_batches", 6, "batches of text whose loss is measured")
    parser.add_record(BUILD / "exact")
    args = parser.parse_args(argv)
    if args.exact[0] != 0 or min(args.exact) < 0 or max(args.exact) >= args.batch:
        counts = " ".join(map(str, args.exact))
        parser.error(f"--exact must be 0, then numbers below {args.batch} (got {counts})")
    record = parser.open_record("exact", args, argv)
    arms = [(BASELINE, 0), *((policy, count) for policy in args.policies for count in args.exact)]
    if any(_name(*arm) not in record for arm in arms):
        flags = [*prepare(WIDENED), "--enable-metrics", "--disable-radix-cache", *SERVER_ARGS]
        flags += parse_variant(args.policies[0]).server_args()
        with Server(WIDENED, flags, name="exact", deadline=600) as server:
            measure(record, server, arms, args)
    tabulate_exact(record.points).show(record.path)


def _name(policy: str, count: int) -> str:
    return policy if policy == BASELINE else f"{policy}, {count} exact"


class Marking(Instrument):
    """An instrument that sends some requests of a batch as exact. `marked` contains the positions of these requests."""

    marked: Sequence[int] = ()

    def ask(self, path: str, body: dict[str, Any] | None = None, *args: Any, **more: Any) -> Any:
        """Send a batch of requests. If each has its own sampling parameters, mark the exact requests in them."""
        if body is not None and isinstance(body.get("sampling_params"), list):
            for place in self.marked:
                body["sampling_params"][place].setdefault("custom_params", {})[KEY] = EXACT
        return super().ask(path, body, *args, **more)


def measure(record: Record, server: Server, arms: Sequence[tuple[str, int]], args: argparse.Namespace) -> None:
    """Measure the speed of all arms in alternating rounds, and then the loss of each arm."""
    asking = Marking(server.url)
    length, batches = args.output_tokens, args.rounds + 1 + args.loss_batches
    sequences = load_sequences(TEXTS, WIDENED, 32 + length + 1, -(-args.batch * batches // 4)).mix()
    some = [batch.tolist() for batch in sequences.tokens.split(args.batch)][:batches]
    timed, forced = some[: args.rounds + 1], some[args.rounds + 1 :]
    totals = {arm: dict.fromkeys(COUNTS, 0.0) for arm in arms}
    speeds: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}

    def choose(number: int, arm: tuple[str, int]) -> None:
        server.post("/expert_policy", parse_variant(arm[0]).body())
        asking.marked = random.Random(number).sample(range(args.batch), max(args.exact))[: arm[1]]

    def generate(texts: list[list[int]]) -> float:
        each = [{"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for _ in texts]
        began = time.perf_counter()
        asking.ask("/generate", {"input_ids": [text[:8] for text in texts], "sampling_params": each}, 1800)
        return len(texts) * length / (time.perf_counter() - began)

    generate(timed[-1])  # a warm-up with prompts that no round uses
    for number in range(args.rounds):
        for arm in (arms[place] for place in order_round(len(arms), number)):
            choose(number, arm)
            before = read_settled_totals(server)
            speeds[arm].append(generate(timed[number]))
            after = read_settled_totals(server)
            for key in COUNTS:
                totals[arm][key] += after.get(key, 0.0) - before.get(key, 0.0)
        last = ", ".join(f"{speeds[arm][-1]:.0f}" for arm in arms)
        print(f"round {number + 1}/{args.rounds}: {last} tokens/s", flush=True)
    shape = {name: getattr(args, name) for name in SHAPE}
    for arm in arms:
        nats, exact = [], []
        for number, texts in enumerate(forced):
            choose(number, arm)
            predictions = asking.force([text[:32] for text in texts], [text[32:] for text in texts])
            nats += [sum(step.nats for step in one) / len(one) for one in predictions]
            exact += [place in asking.marked for place in range(len(texts))]
        print(f"{_name(*arm)}: {sum(nats) / len(nats):.4f} nats a token", flush=True)
        record.add(_name(*arm), shape=shape, speeds=speeds[arm], totals=totals[arm], nats=nats, exact=exact)


def tabulate_exact(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy and number of exact requests."""
    (first_name, first), *others = points.items()
    steps = sum(point["totals"]["layer_steps"] for _, point in others)
    before = sum(point["totals"]["experts_before"] for _, point in others) / steps
    speed = format_spread(spread(first["speeds"]), 0)
    rows = [[first_name, "-", speed, "1.00", "-", "-", f"{before:.1f}", "1.000", "-", "-", "-"]]
    whole: Mapping[str, Any] = first
    for name, point in others:
        policy, _, count = name.removesuffix(" exact").rpartition(", ")
        whole = point if count == "0" else whole  # each policy starts with 0 exact requests
        totals, ratios, gains = point["totals"], _ratios(point, first), _ratios(whole, first)
        pairs = [(ratio, gain) for ratio, gain in zip(ratios, gains, strict=True) if gain > 1]
        kept = [(ratio - 1) / (gain - 1) for ratio, gain in pairs]
        saved = [(1 - 1 / ratio) / (1 - 1 / gain) for ratio, gain in pairs]
        others_mass = (totals["kept_mass"] - totals["exact_rows"]) / (totals["rows"] - totals["exact_rows"])
        exact = torch.tensor(point["exact"])
        nats, own = torch.tensor(point["nats"]), torch.tensor(first["nats"])
        loss = compare_loss(nats[:, None], own[:, None], ~exact[:, None], point["shape"]["batch"])
        rows.append(
            [
                policy,
                count,
                format_spread(spread(point["speeds"]), 0),
                format_spread(spread(ratios), 2),
                *(format_spread(spread(share), 2) if share else "-" for share in (kept, saved)),
                f"{totals['experts_after'] / totals['layer_steps']:.1f}",
                f"{others_mass:.3f}",
                str(loss),
                f"{(nats - own)[exact].abs().max():.4f}" if exact.any() else "-",
                format_rounds(ratios, 2),
            ]
        )
    headings = ["policy", "exact", "tokens/s", "ratio", "gain kept", "time kept", "active", "others' kept mass"]
    headings += ["others' loss, nats", "exact rows' loss", "ratio by round"]
    return Table("Exact requests beside others, served", headings, rows, NOTE.format(**first["shape"]))


def _ratios(point: Mapping[str, Any], first: Mapping[str, Any]) -> list[float]:
    return [speed / own for speed, own in zip(point["speeds"], first["speeds"], strict=True)]


if __name__ == "__main__":
    run_main("exact", main)
