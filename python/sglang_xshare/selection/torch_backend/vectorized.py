"""Selection in vectorized torch: no loop over rows, experts or requests, no host synchronization, on any device.

A CUDA graph can capture it.
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, RunnerSlots, Selection
from ..scores import to_fixed_point
from ..slots import serve_runner
from .rows import Rows, Slots, mark, rank_rows
from .shortlist import select_experts

# Keeps 0 / 0 at 0 and changes no other quotient of float32.
_TINY = 2.0**-149


@torch.no_grad()
def select(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
    slots: RunnerSlots | None,
) -> Selection:
    """Route rows [n, N] by `plan`; see `sglang_xshare.selection.select`."""
    rows = rank_rows(logits, plan, router, batch)
    kept = _keep(rows, plan)
    selected = select_experts(rows, plan, rank_of_expert, kept)
    lost = _rescue(rows, selected) if plan.can_rescue else selected.new_zeros(0)
    chosen = _cover(rows, plan, kept, selected)
    ids = torch.where(chosen.live, chosen.experts, -1).int()
    weights = _renormalize(rows, plan, chosen) if router.renormalize else chosen.scores
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()[ids.clamp_min(0)]
    missing = plan.columns(router, exact=batch.exact is not None) - ids.shape[1]
    active, vanilla_active = torch.zeros_like(selected), torch.zeros_like(selected)
    mark(active, chosen.experts, chosen.live)
    mark(vanilla_active, rows.own.experts, rows.own.live)
    kept_mass = (chosen.scores.sum(1) / rows.own.scores.sum(1)).nan_to_num_(nan=1.0, posinf=1.0)
    answer = Selection(
        topk_ids=pad(ids, (0, missing), value=-1),
        topk_weights=pad(weights, (0, missing)) * router.scaling,
        selected=selected,
        active=active,
        rescued=lost.sum(),
        vanilla_active=vanilla_active,
        # Of exact rows sums of more columns may round otherwise.
        kept_mass=torch.where(rows.voiced.squeeze(1), kept_mass, rows.valid.squeeze(1).float()),
    )
    return answer if slots is None else replace(answer, **serve_runner(answer, logits, router.top_k, slots))


def _keep(rows: Rows, plan: SelectionPlan) -> torch.Tensor:
    """[n, k] bool: which of its own top-k a row keeps, as its warm-up or after dynamic-skip; an exact row all."""
    kept = rows.own.live
    place = torch.arange(rows.top_k, device=kept.device)
    if plan.k0 is not None:
        kept = kept & (place < plan.k0)
    if plan.p < 1:
        fixed = to_fixed_point(rows.measures.gather(1, rows.own.experts) * rows.own.live)
        reach = plan.p * to_fixed_point(rows.measures).sum(1, keepdim=True)
        kept = kept & ((fixed.cumsum(1) - fixed < reach) | (place == 0))
    if plan.beta is not None:
        scores = rows.own.scores.double()
        kept = kept & ((scores >= plan.beta * scores[:, :1]) | (place == 0))
    if plan.warm_rows is not None and rows.depth is not None:
        kept = kept & (rows.depth < plan.warm_rows)
    return torch.where(rows.voiced, kept, rows.own.live)


def _rescue(rows: Rows, selected: torch.Tensor) -> torch.Tensor:
    """Add to S the first choice of every row whose top-k lies outside. Returns these rows, [n] bool."""
    inside = selected[rows.own.experts] & rows.own.live
    lost = ~inside.any(1) & rows.own.live[:, 0]
    mark(selected, rows.own.experts[:, 0], lost)
    return lost


def _cover(rows: Rows, plan: SelectionPlan, kept: torch.Tensor, selected: torch.Tensor) -> Slots:
    """The experts of every row, as the plan's coverage has it."""
    if plan.substitutes:
        return _substitute(rows, plan, kept, selected)
    return rows.own.keep(selected[rows.own.experts] & rows.own.live if plan.uses_selected else kept)


def _substitute(rows: Rows, plan: SelectionPlan, kept: torch.Tensor, selected: torch.Tensor) -> Slots:
    """Every row's `kmax` best in S, as far down its ranking as `max_rank` or its warm-up."""
    inside = selected
    if plan.max_rank is not None and plan.max_rank < rows.num_experts:
        last = rows.keys.topk(plan.max_rank, 1).values[:, -1:]
        own = torch.zeros_like(rows.keys, dtype=torch.bool).scatter_(1, rows.own.experts, kept)
        inside = selected & ((rows.keys >= last) | own)
    chosen = rows.find_best(inside, min(plan.kmax or rows.top_k, rows.num_experts))
    if rows.exact is None:
        return chosen
    given = zip(rows.own.widen(chosen.experts.shape[1]), chosen.widen(rows.top_k), strict=True)
    return Slots(*(torch.where(rows.exact, own_slots, others) for own_slots, others in given))


def _renormalize(rows: Rows, plan: SelectionPlan, chosen: Slots) -> torch.Tensor:
    """[n, m]: the chosen scores over their divisor. Where that is 0, all scores count as 1."""
    own = rows.own
    massless = _divisor(rows, plan, chosen.scores, own.scores) == 0
    scores, own_scores = (torch.where(massless, slots.live.float(), slots.scores) for slots in (chosen, own))
    return scores / _divisor(rows, plan, scores, own_scores).clamp_min_(_TINY)


def _divisor(rows: Rows, plan: SelectionPlan, chosen: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[n, 1] float32: a geometric mean of what the chosen scores [n, m] and the row's own [n, k] add up to, in float64
    between; of an exact row its own sum.
    """
    got, whole = chosen.sum(1, keepdim=True), own.sum(1, keepdim=True)
    mean = got.double() ** (1 - plan.own_power) * whole.double() ** plan.own_power
    return torch.where(rows.voiced, mean.float(), whole)
