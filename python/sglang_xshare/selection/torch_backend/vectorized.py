"""Selection in vectorized torch on any device, without loops over rows, experts or requests.

A CUDA graph can capture the selection, because the host never waits. On a CPU each operation takes microseconds
whatever its size, so the common plans use few operations.
"""

from functools import cache

import torch
from torch.nn.functional import pad

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, Selection
from ..handled import FULL
from ..scores import to_fixed_point
from .rows import Rows, Slots, mark, rank_rows
from .shortlist import select_experts

HANDLED = FULL
"""This backend reads all keys and words of a plan, because it runs every plan that no compiled backend supports."""
# The smallest divisor. It turns 0 / 0 into 0 and changes no other quotient of float32 numbers.
_TINY = 2.0**-149


def select(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
) -> Selection:
    """Select the batch's experts and each row's experts; see `sglang_xshare.selection.select`."""
    selected = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    # Autograd is off, because it would take a quarter of the time on a CPU. The returned tensors are made outside this
    # block, because a caller could not change an inference tensor in place.
    with torch.inference_mode():
        rows = rank_rows(logits, router, batch, plan.by_depth)
        kept = _keep(rows, plan)
        select_experts(rows, plan, rank_of_expert, kept, selected)
        lost = _rescue(rows, selected) if plan.can_rescue else selected.new_zeros(0)
        if plan.substitutes:
            chosen = _substitute(rows, plan, kept, selected)
        else:
            chosen = rows.own.keep(selected[rows.own.experts] & rows.own.live if plan.uses_selected else kept)
        shares, total = _share(rows, plan, router, chosen) if router.renormalize else (chosen.scores, None)
        experts = torch.where(chosen.live, chosen.experts, -1)
    ids, weights = experts.int(), shares.clone() if total is None else shares / total
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.detach().float()[ids.clamp_min(0)]
    missing = plan.columns(router, exact=batch.exact is not None) - ids.shape[1]
    if missing:
        ids, weights = pad(ids, (0, missing), value=-1), pad(weights, (0, missing))
    if router.scaling != 1:
        weights = weights * router.scaling
    active, vanilla_active = torch.zeros_like(selected), torch.zeros_like(selected)
    mark(active, chosen.experts, chosen.live)
    mark(vanilla_active, rows.own.experts, rows.own.live)
    kept_mass = (chosen.scores.sum(1) / rows.own.scores.sum(1)).nan_to_num_(nan=1.0, posinf=1.0)
    if rows.exact is not None:  # an exact row's two sums have different numbers of columns and may round differently
        kept_mass = kept_mass.masked_fill(rows.exact.squeeze(1), 1.0)
    kept_mass = kept_mass if batch.valid is None else kept_mass * batch.valid
    return Selection(ids, weights, selected, active, lost.sum(), vanilla_active, kept_mass)


def _keep(rows: Rows, plan: SelectionPlan) -> torch.Tensor:
    """Return a mask [n, k] bool of the experts that each row keeps from its own top-k.

    A row keeps its warm-up. An exact row keeps its whole top-k.
    """
    kept = rows.own.live
    if plan.k0 is not None:
        kept = kept & _first(plan.k0, rows.top_k, kept.device)
    if plan.p < 1:
        fixed = to_fixed_point(rows.measures.gather(1, rows.own.experts) * rows.own.live)
        reach = plan.p * to_fixed_point(rows.measures).sum(1, keepdim=True)
        kept = kept & (fixed.cumsum(1) - fixed < reach).logical_or_(_first(1, rows.top_k, kept.device))
    if plan.beta is not None:
        scores = rows.own.scores.double()
        kept = kept & (scores >= plan.beta * scores[:, :1]).logical_or_(_first(1, rows.top_k, kept.device))
    if plan.warm_rows is not None and rows.depth is not None:
        kept = kept & (rows.depth < plan.warm_rows)
    return kept if rows.exact is None else torch.where(rows.exact, rows.own.live, kept)


@cache
def _first(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Return a mask [length] bool whose first `count` elements are set. `lower_first` explains the cache."""
    return (torch.arange(length, device="cpu") < count).to(device)


def _rescue(rows: Rows, selected: torch.Tensor) -> torch.Tensor:
    """Add the first choice of every rescued row to S. Return a mask [n] bool of the rescued rows.

    A row is rescued if S contains no expert of the row's top-k.
    """
    inside = selected[rows.own.experts] & rows.own.live
    lost = ~inside.any(1) & rows.own.live[:, 0]
    mark(selected, rows.own.experts[:, 0], lost)
    return lost


def _substitute(rows: Rows, plan: SelectionPlan, kept: torch.Tensor, selected: torch.Tensor) -> Slots:
    """Return the `kmax` best experts of every row.

    A row may use its warm-up. It may also use those experts of S that are among the first `max_rank` of its own
    ranking.
    """
    inside = selected
    if plan.max_rank is not None and plan.max_rank < rows.num_experts:
        last = rows.keys.topk(plan.max_rank, 1).values[:, -1:]
        warm = torch.zeros_like(rows.keys, dtype=torch.bool).scatter_(1, rows.own.experts, kept)
        inside = selected & ((rows.keys >= last) | warm)
    chosen = rows.find_best(inside, min(plan.kmax or rows.top_k, rows.num_experts))
    if rows.exact is None:
        return chosen
    given = zip(rows.own.widen(chosen.experts.shape[1]), chosen.widen(rows.top_k), strict=True)
    return Slots(*(torch.where(rows.exact, own_slots, others) for own_slots, others in given))


def _share(rows: Rows, plan: SelectionPlan, router: Router, chosen: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [n, m] and a divisor [n, 1]. The weights of a model that renormalizes are scores / divisor.

    The divisor is the sum of these scores, the sum over the row's own top-k, or a geometric mean of both. `own_power`
    decides which. If the divisor is 0, every score counts as 1.
    """
    own = rows.own
    whole = _divisor(chosen, own, plan.own_power, rows.exact)
    # The largest of N softmax scores is at least 1 / N. The sum of a row that has its first choice is therefore never
    # 0.
    has_first = plan.own_power == 1 or plan.warms_all
    has_first = has_first and router.scoring == "softmax" and router.correction_bias is None
    if not has_first:
        massless = whole.logical_not()
        chosen = _equalize(chosen, massless)
        own = _equalize(own, massless) if plan.own_power or rows.exact is not None else own
        whole = _divisor(chosen, own, plan.own_power, rows.exact)
    return chosen.scores, whole.clamp_min_(_TINY)


def _divisor(chosen: Slots, own: Slots, own_power: float, exact: torch.Tensor | None) -> torch.Tensor:
    """Return the divisor of each row [n, 1] float32. Exact rows divide by the sum over their own top-k.

    The geometric mean is computed in float64, because there the mean of two equal sums is exactly this sum.
    """
    if exact is not None:
        others = _divisor(chosen, own, own_power, None)
        return torch.where(exact, own.scores.sum(1, keepdim=True), others)
    if own_power == 0:
        return chosen.scores.sum(1, keepdim=True)
    whole = own.scores.sum(1, keepdim=True)
    if own_power == 1:
        return whole
    return chosen.scores.sum(1, keepdim=True).double().pow_(1 - own_power).mul_(whole.double().pow_(own_power)).float()


def _equalize(slots: Slots, massless: torch.Tensor) -> Slots:
    """Return the slots with score 1 for every expert of the rows that `massless` [n, 1] bool marks."""
    return slots._replace(scores=slots.scores.masked_fill(massless, 1.0).masked_fill_(~slots.live, 0.0))
