"""Selection in vectorized torch: no loop over rows, experts or requests, no host synchronization, on any device.

A CUDA graph can capture it. On the CPU each operation costs microseconds whatever its size: the common plans take few.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ..plan import SelectionPlan
from ..types import Batch, Router, Selection
from .rows import Rows, Slots, find_best, mark, rank_rows
from .scores import to_grid
from .shortlist import select_experts

# Keeps 0 / 0 at 0 and changes no other quotient of float32.
_TINY = 2.0**-149
_MINUS_INF = torch.tensor(-math.inf, dtype=torch.float64)


def select(
    logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch, rank_of_expert: torch.Tensor | None
) -> Selection:
    """Route rows [n, N] by `plan`; see `sglang_xshare.selection.select`."""
    selected = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    active, vanilla_active = torch.zeros_like(selected), torch.zeros_like(selected)
    # Autograd would take a quarter of the time on the CPU. What is returned is made outside: ordinary tensors.
    with torch.inference_mode():
        rows = rank_rows(logits, router, batch)
        kept = _keep(rows, plan)
        select_experts(rows, plan, rank_of_expert, kept, selected)
        lost = _rescue(rows, selected) if plan.coverage == "truncate" and plan.rescue else None
        chosen = _cover(rows, plan, kept, selected)
        mark(active, chosen.experts, chosen.live)
        mark(vanilla_active, rows.own.experts, rows.own.live)
        mass, own_mass = chosen.scores.sum(1, keepdim=True), rows.own.scores.sum(1, keepdim=True)
        empty = ~chosen.live
        shares, total = chosen.scores, torch.ones_like(mass)
        if router.renormalize:
            shares, total = _share(rows, plan, chosen, mass, own_mass, empty)
    ids = chosen.experts.int().masked_fill_(empty, -1)
    weights = shares / total
    missing = (plan.kmax or rows.top_k) - ids.shape[1]
    if missing:
        ids, weights = pad(ids, (0, missing), value=-1), pad(weights, (0, missing))
    kept_mass = (mass / own_mass).nan_to_num_(nan=1.0, posinf=1.0).squeeze(1)
    return Selection(
        topk_ids=ids,
        topk_weights=weights,
        selected=selected,
        active=active,
        rescued=torch.zeros((), dtype=torch.int64, device=ids.device) if lost is None else lost.sum(),
        vanilla_active=vanilla_active,
        kept_mass=kept_mass if batch.valid is None else kept_mass * batch.valid,
    )


def _keep(rows: Rows, plan: SelectionPlan) -> torch.Tensor:
    """[n, k] bool: which of its own top-k a row keeps, as its warm-up or after dynamic-skip."""
    kept = rows.own.live
    if plan.k0 is not None:
        kept = kept & _first(plan.k0, rows.top_k, kept.device)
    if plan.p < 1:
        grid = to_grid(rows.own.scores)
        reach = plan.p * to_grid(rows.scores).sum(1, keepdim=True)
        kept = kept & (grid.cumsum(1) - grid < reach).logical_or_(_first(1, rows.top_k, kept.device))
    if plan.beta is not None:
        scores = rows.own.scores.double()
        kept = kept & (scores >= plan.beta * scores[:, :1]).logical_or_(_first(1, rows.top_k, kept.device))
    return kept


@lru_cache(maxsize=64)
def _first(count: int, length: int, device: torch.device) -> torch.Tensor:
    """[length] bool: the first `count` are set. Made on the host for the same reason as `lower_first`."""
    return (torch.arange(length) < count).to(device)


def _rescue(rows: Rows, selected: torch.Tensor) -> torch.Tensor:
    """Add to S the first choice of every row whose top-k lies outside. Returns these rows, [n] bool."""
    inside = selected[rows.own.experts] & rows.own.live
    lost = ~inside.any(1) & rows.own.live[:, 0]
    mark(selected, rows.own.experts[:, 0], lost)
    return lost


def _cover(rows: Rows, plan: SelectionPlan, kept: torch.Tensor, selected: torch.Tensor) -> Slots:
    """Stage 2: the experts of every row. A further coverage is a case here and a name in the plan's COVERAGES."""
    if plan.coverage == "substitute":
        return _substitute(rows, plan, kept, selected)
    return rows.own.keep(kept if plan.coverage == "own" else selected[rows.own.experts] & rows.own.live)


def _substitute(rows: Rows, plan: SelectionPlan, kept: torch.Tensor, selected: torch.Tensor) -> Slots:
    """Every row's `kmax` best in S, as far down its ranking as `max_rank` or its warm-up."""
    inside = selected
    if plan.max_rank is not None and plan.max_rank < rows.num_experts:
        reach = kept.sum(1, keepdim=True).clamp_min_(plan.max_rank)
        ranked = rows.keys.topk(max(plan.max_rank, rows.top_k), 1).values
        inside = selected & (rows.keys >= ranked.gather(1, reach - 1))
    keys = torch.where(inside, rows.keys, _MINUS_INF)
    return find_best(rows.scores, keys, min(plan.kmax or rows.top_k, rows.num_experts), rows.valid)


def _share(
    rows: Rows, plan: SelectionPlan, chosen: Slots, mass: torch.Tensor, own_mass: torch.Tensor, empty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores [n, m], what to divide them by [n, 1]): the weights in a model that renormalizes.

    The divisor is their sum, under truncate that of the whole top-k; where it is 0 the experts share equally.
    """
    if plan.coverage != "truncate":
        shares = chosen.scores.masked_fill(mass.logical_not(), 1.0).masked_fill_(empty, 0.0)
        return shares, shares.sum(1, keepdim=True).clamp_min_(_TINY)
    massless = own_mass.logical_not()
    whole = rows.own.scores.masked_fill(massless, 1.0).masked_fill_(~rows.own.live, 0.0)
    shares = chosen.scores.masked_fill(massless, 1.0).masked_fill_(empty, 0.0)
    return shares, whole.sum(1, keepdim=True).clamp_min_(_TINY)
