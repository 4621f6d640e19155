"""Active experts a layer and step: from a trace, or from selection itself on drawn logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..admission.model import MoeModel
from ..policies import VANILLA
from ..policies.schedule import Schedule
from ..selection import select
from ..types import Batch, Router, Selection

COMMON = 0.47
"""Share of the logits' variance that all rows have in common at which as many experts are active as OEA counted on
Qwen3-30B-A3B with 16 rows: 49 of 128.
"""
ASSUMPTIONS = {"rows agree as Qwen3-30B-A3B's": COMMON, "rows route independently": 0.0}
MOST_ROWS = 16_384
"""Rows of a step that are drawn: at 256 experts 0.6 GB, and 2.6 s of a CPU core a layer."""
LAYERS = 48
"""Layers drawn for a mean."""


@dataclass(frozen=True)
class Load:
    """Of one MoE layer and step: `active` experts, those of the rank that has most of them, `fullest`."""

    active: float
    fullest: float


@dataclass(frozen=True)
class Drawn:
    """Means over layers: the load by the model's own routing and by the policy, and the mass that it keeps, None where
    nobody knows.
    """

    before: Load
    after: Load
    kept_mass: float | None


def draw_loads(
    schedule: Schedule,
    model: MoeModel,
    rows: int,
    tokens_per_request: int,
    common: float,
    ranks: int = 1,
) -> Drawn:
    """Select from drawn logits, `common` as `COMMON`; experts lie on the ranks as many each, in order.

    The logits of a layer are normal, a part of them the same for all rows; the router renormalizes. Raises ValueError
    for a plan that the model does not fit.
    """
    router, batch = Router(top_k=model.top_k, scoring=model.scoring), Batch(tokens_per_request=tokens_per_request)
    rank_of_expert = torch.arange(model.num_experts) * ranks // model.num_experts
    counts, kept = [], []
    for number, logits in enumerate(_draw_logits(model, rows, common)):
        plans = VANILLA, schedule.plan(number % model.num_layers, rows) or VANILLA
        outs = [select(logits, plan, router, batch, rank_of_expert, backend="torch") for plan in plans]
        counts.append([_count_load(out, rank_of_expert, ranks) for out in outs])
        kept.append(float(outs[1].kept_mass.mean()))
    before, after = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return Drawn(Load(*before), Load(*after), sum(kept) / len(kept))


def _draw_logits(model: MoeModel, rows: int, common: float) -> Iterator[torch.Tensor]:
    """[rows, experts] of each layer."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(LAYERS):
        own = torch.randn(rows, model.num_experts, generator=generator)
        shared = torch.randn(1, model.num_experts, generator=generator)
        yield common**0.5 * shared + (1 - common) ** 0.5 * own


def _count_load(out: Selection, rank_of_expert: torch.Tensor, ranks: int) -> tuple[int, int]:
    """Active experts, and those of the fullest rank."""
    experts = torch.bincount(rank_of_expert[out.active], minlength=ranks)
    return int(experts.sum()), int(experts.max())


def read_active(trace: Path, requests: int, policy: str) -> tuple[float, float, bool]:
    """(mean experts before, mean experts after, whether they are `policy`'s) of a file of `--expert-policy-trace`, over
    steps of as many live rows. A file of `observe` has what its plan spelt `policy` would have kept; any other has what
    its server's policy kept, which it does not name.

    Raises ValueError where the file has none.
    """
    try:
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        sizes = sorted({line["batch_size"] for line in lines})
        lines = [line for line in lines if line["batch_size"] == requests]
        observed = sorted({name for line in lines for name in line.get("plans", ())})
        found = policy in observed
        after = [line["plans"][policy]["experts_after"] if found else line["experts_after"] for line in lines]
        counts = [(line["experts_before"], kept) for line, kept in zip(lines, after, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--trace {trace}: not readable ({error}); allowed is a file of --expert-policy-trace"
        ) from None
    if not counts:
        raise ValueError(f"--trace {trace}: no step of {requests} rows; it has {', '.join(map(str, sizes)) or 'none'}")
    if observed and not found:
        raise ValueError(f"{policy}: not among the plans that --trace {trace} observed: {', '.join(observed)}")
    before, mean_after = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return before, mean_after, found
