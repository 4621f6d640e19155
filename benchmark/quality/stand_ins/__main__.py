"""What stand-ins for dropped experts save, in bytes loaded: `python -m benchmark.quality.stand_ins`.

A row's own choice that a plan does not keep is computed by a small approximation of that expert, with the expert's own
weight. Against it stands the plan alone, whose rows take other experts that are awake.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.affinity.texts import write_texts
from benchmark.common.command import Parser, folder, one_line_errors
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding, add_decoding, read_decoding
from benchmark.quality.measure import Bench
from benchmark.quality.model import prefill, router_of
from benchmark.quality.stand_ins.decode import decode, observe, read_weights
from benchmark.quality.stand_ins.factors import StandIns, low_rank, shared_basis
from benchmark.quality.stand_ins.report import ALONE, plot_stand_ins, tabulate_stand_ins
from benchmark.quality.text import Sequences, load_sequences

COUNTS = ("per_domain", "prompt", "steps", "batch")
KEYS = dict(zip(ALONE, ("", ",own_share=0.75,utility=squared"), strict=True))
"""Of the plans alone, beside the budget."""
KINDS = ("low rank", "low rank, by inputs", "shared basis", "shared basis, by inputs")
SHARES = (1 / 16, 1 / 8, 1 / 4)
"""Of an expert's bytes, what one stand-in may take."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, write the plot."""
    parser = Parser("benchmark.quality.stand_ins", __doc__)
    help = "folder of *.txt on which experts' inputs are observed (default: text that no checkpoint is trained on)"
    parser.add_argument("--inputs", type=folder, help=help)
    parser.add_count("observed", 32, "sequences of each of those texts")
    add_decoding(parser, COUNTS, steps=64)
    parser.add_record(BUILD / "quality" / "stand_ins")
    args = parser.parse_args(argv)
    decoding = read_decoding(args, tokens_per_request=1)
    record = parser.open_record("stand_ins", args, argv)
    model, sequences = decoding.load()
    length = decoding.prompt + decoding.steps
    texts = load_sequences(args.inputs or write_texts(), decoding.model, length, args.observed)
    bench = _Bench(model, sequences.take(sequences.mixing()), decoding)
    for name, keys in KEYS.items():
        for plan in bench.list_plans(keys, range(0, 28, 2)):
            if (key := f"{name}, {plan}") not in record:
                record.add(key, kind=name, **bench.run_alone(plan))
    for name, stand_ins in make_stand_ins(model, texts.tokens):
        for plan in bench.list_plans(",utility=squared", range(0, 16, 4)):
            if (key := f"{name}, {plan}") not in record:
                record.add(key, kind=name, **bench.run_with(plan, stand_ins))
    tabulate_stand_ins(record.points, models=[decoding.model.name]).show()
    plot_stand_ins(args.out / "stand_ins.png", record.points, f"Stand-ins for dropped experts: {decoding.model.name}")
    print(f"Record: {record.path}, plot: {args.out / 'stand_ins.png'}")


def make_stand_ins(model: PreTrainedModel, tokens: torch.Tensor) -> Iterator[tuple[str, list[StandIns]]]:
    """(name, of each MoE layer), each KIND at each of SHARES; inputs are observed on `tokens` [sequences, tokens]."""
    layers = list(zip(read_weights(model), observe(model, tokens), strict=True))
    for kind in KINDS:
        for share in SHARES:
            found = []
            for weights, (each, all_experts) in layers:
                if kind.startswith("low rank"):
                    found.append(low_rank(weights, share, each if kind.endswith("by inputs") else None))
                else:
                    found.append(shared_basis(weights, share, all_experts if kind.endswith("by inputs") else None))
            yield f"{kind}, 1/{1 / share:.0f}", found


class _Bench:
    """A model on the text that is measured."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, decoding: Decoding) -> None:
        self._layout, self._num_experts = decoding.layout, router_of(model)[1]
        self._alone = Bench(model, sequences, decoding.prompt)
        self._prefilled = prefill(model, sequences.tokens[:, : decoding.prompt])
        self._tokens = sequences.tokens[:, decoding.prompt :]
        self._vanilla = self._alone.run(parse_plan(BASELINE), self._layout)

    def list_plans(self, keys: str, budgets: Sequence[int]) -> list[str]:
        """XShare's, with budgets of so many of 64 experts, or as large a share of another number."""
        adds = dict.fromkeys(self._num_experts * budget // 64 for budget in budgets)
        return [f"xshare:k0=1,add={add}{keys}" for add in adds]

    def run_alone(self, plan: str) -> dict[str, Any]:
        """What `plan` wakes and loses."""
        decoded = self._alone.run(parse_plan(plan), self._layout)
        return self._point(plan, decoded.nats, decoded.active, 0.0, decoded.active)

    def run_with(self, plan: str, stand_ins: Sequence[StandIns]) -> dict[str, Any]:
        """The same where dropped choices have stand-ins."""
        tokens = self._tokens
        logits, loads = decode(self._prefilled, tokens[:, :-1], parse_plan(plan), self._layout, stand_ins)
        nats = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(tokens[:, 1:])
        sizes = {"own": stand_ins[0].own, "common": stand_ins[0].common}
        means = (torch.cat(layers).mean().item() for layers in (loads.awake, loads.used, loads.worth))
        return self._point(plan, nats, *means) | sizes

    def _point(self, plan: str, nats: torch.Tensor, awake: float, used: float, worth: float) -> dict[str, Any]:
        """Means a layer and step: `awake` experts, stand-ins `used`, what is loaded in experts' `worth` of bytes; and
        `deltas`, each sequence's loss above vanilla's in nats a token.
        """
        deltas = (nats - self._vanilla.nats).double().mean(1)
        print(f"{plan}: {awake:.1f} experts, {used:.1f} stand-ins, {deltas.mean() * 1000:+.1f} mnats", flush=True)
        return {
            "policy": plan,
            "vanilla_active": self._vanilla.active,
            "awake": awake,
            "used": used,
            "worth": worth,
            "deltas": [round(one, 6) for one in deltas.tolist()],
        }


if __name__ == "__main__":
    with one_line_errors("stand_ins"):
        main()
