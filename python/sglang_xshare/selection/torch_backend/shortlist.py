"""The set S of the vectorized backend, as a table [N] bool.

Counts that depend on data stay on the device. So the best m experts are stored as a sorted list of fixed size with a
mask. Utilities are integers in float64, whose sums are exact in any order up to 2^53. Thresholds are not rounded,
because an integer reaches a threshold if and only if it reaches the threshold rounded up.
"""

from functools import cache

import torch

from ...policies.plan import SelectionPlan
from ..scores import DEPTHS, TINY, to_fixed_point, weigh_depths
from .rows import Rows, lower_first, mark

# The step that breaks ties between integers. The steps of 1,024 experts add up to less than 1.
_TIE = 2.0**-10
# This number is added to put an expert ahead of all others. It is larger than every utility, but small enough that a
# float64 still has bits for the ties.
_AHEAD = 2.0**41


def select_experts(
    rows: Rows, plan: SelectionPlan, rank_of_expert: torch.Tensor | None, kept: torch.Tensor, selected: torch.Tensor
) -> None:
    """Add the experts of S to `selected`, which must be empty.

    `kept` [n, k] bool marks the experts that each row keeps from its own top-k.
    """
    mark(selected, rows.own.experts, kept)
    if plan.ranks_experts:
        _add_ranked(rows, plan, selected)
    elif plan.confidence is not None:
        _follow_voters(rows, plan, plan.confidence, selected)
    else:
        _add_by_utility(rows, plan, rank_of_expert, kept, selected)


def _add_by_utility(
    rows: Rows, plan: SelectionPlan, rank_of_expert: torch.Tensor | None, kept: torch.Tensor, selected: torch.Tensor
) -> None:
    free = rows.batch.resident if plan.takes_residents else None  # [N] bool: loaded experts, which no budget counts
    if free is None and not plan.adds:
        return

    def taken(experts: torch.Tensor) -> torch.Tensor:
        return experts if free is None else experts | free

    chance = _find_chance(rows, plan)
    if plan.add_per_request:
        by_request = _compute_utility(rows, plan.utility, rows.num_requests, chance)
        kept_by_request = taken(_sum_at_own(rows, kept.double(), rows.num_requests).bool())
        selected |= _find_best(by_request, plan.add_per_request, kept_by_request).any(0)
        utility = by_request.sum(0)
    else:
        utility = _compute_utility(rows, plan.utility, 1, chance).squeeze(0)
    sure = None if free is None else selected.clone()
    if plan.add:
        selected |= _find_best(utility, plan.add, taken(selected))
    if plan.mass is not None:
        mark(selected, *_reach_mass(utility, plan.mass, plan.max_add, taken(selected)))
    if plan.target_per_rank is not None:
        assert rank_of_expert is not None
        held = _find_held(rows, 1)
        selected |= _balance(utility, plan.target_per_rank, plan.balance, rank_of_expert, selected, held)
    if free is not None and sure is not None:
        _join(utility, free, rows.batch.slots, sure, selected)


def _join(
    utility: torch.Tensor, free: torch.Tensor, slots: int | None, sure: torch.Tensor, selected: torch.Tensor
) -> None:
    """Add loaded experts with utility to S until the page slots are full.

    Experts in `sure` [N] come first. Then come the experts that the batch has added, and then other loaded experts.
    The last two groups are ordered by utility.
    """
    joining = free & (utility > 0)
    if slots is None:
        selected |= joining
        return
    standing = utility + selected * _AHEAD
    keys, experts = _rank(standing, sure | ~(selected | joining)).sort(descending=True)
    room = slots - sure.sum()
    selected.copy_(sure)
    mark(selected, experts, (keys >= 1) & (torch.arange(len(keys), device=keys.device) < room))


def _find_held(rows: Rows, groups: int) -> torch.Tensor | None:
    """Return a mask [groups, N] bool of the exact rows' experts, or None if no row can be exact.

    No budget counts these experts.
    """
    if rows.exact is None:
        return None
    return _sum_at_own(rows, (rows.own.live & rows.exact).double(), groups).bool()


def _compute_utility(rows: Rows, kind: str, groups: int, chance: torch.Tensor | None = None) -> torch.Tensor:
    """Return the utility [groups, N] of every expert in each group of rows.

    All groups have the same number of consecutive rows. If `chance` [n, 1] is given, it multiplies the utility of each
    row.
    """
    if kind in ("topk", "squared"):
        own_scores = rows.silence(rows.own.scores).double()
        shares = own_scores / own_scores.sum(1, keepdim=True).clamp_min_(TINY)
        if kind == "squared":
            shares.square_()
        if chance is not None:
            shares = shares.float() * chance
        return _sum_at_own(rows, to_fixed_point(shares), groups)
    fixed = to_fixed_point(rows.measures if chance is None else rows.measures.float() * chance)
    if rows.valid is not None:
        fixed *= rows.valid
    fixed = rows.silence(fixed)
    return fixed.view(groups, len(fixed) // max(groups, 1), rows.num_experts).sum(1)


def _find_chance(rows: Rows, plan: SelectionPlan) -> torch.Tensor | None:
    """Return the factor [n, 1] float32 of each row's utility, or None if depths do not matter."""
    if rows.depth is None or not plan.weighs(rows.batch.tokens_per_request):
        return None
    return _weigh_depths(plan.acceptance, rows.depth.device)[rows.depth.clamp(0, DEPTHS - 1)]


@cache
def _weigh_depths(acceptance: float, device: torch.device) -> torch.Tensor:
    """Return the result of `weigh_depths` on a device. `lower_first` explains the cache."""
    return weigh_depths(acceptance).to(device)


def _sum_at_own(rows: Rows, values: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the sums of `values` [groups, N]. There is one sum for each group of rows and each expert.

    `values` [n, k] float64 contains one value for each expert in the rows' own top-k.
    """
    width = values.numel() // max(groups, 1)
    sums = torch.zeros(groups, rows.num_experts, dtype=torch.float64, device=values.device)
    return sums.scatter_add_(1, rows.own.experts.view(groups, width), values.view(groups, width))


def _rank(utility: torch.Tensor, without: torch.Tensor | None = None) -> torch.Tensor:
    """Return keys [..., N] that rank experts by utility. The lower id wins a tie.

    `without` [..., N] bool marks experts to leave out. Their keys are below 1, and so are the keys of experts without
    utility.
    """
    keys = torch.add(utility, lower_first(utility.shape[-1], utility.device), alpha=_TIE)
    return keys if without is None else keys.masked_fill_(without, 0.0)


def _find_best(utility: torch.Tensor, count: int, without: torch.Tensor | None = None) -> torch.Tensor:
    """Return a mask [..., N] bool of the `count` best experts that have utility and are not in `without`."""
    keys = _rank(utility, without)
    last = keys.topk(min(count, keys.shape[-1]), -1).values[..., -1:]
    return keys >= last.clamp_min(1.0)


def _reach_mass(
    utility: torch.Tensor, mass: float, max_add: int | None, selected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all experts, best first, and a mask of the ids that join S. Both have the shape [N].

    Experts join S until it holds the share `mass` of the utility (XShare, Algorithm 1). At most `max_add` experts join.
    """
    keys, experts = _rank(utility, selected).sort(descending=True)
    live = keys >= 1
    gains = utility[experts] * live
    before = (utility * selected).sum() + gains.cumsum(0) - gains
    added = live & (before < mass * utility.sum())
    if max_add is not None and max_add < len(experts):
        added[max_add:] = False
    return experts, added


def _balance(
    utility: torch.Tensor,
    target: int,
    balance: str,
    rank_of_expert: torch.Tensor,
    selected: torch.Tensor,
    held: torch.Tensor | None,
) -> torch.Tensor:
    """Return a mask [N] bool of the experts that the ranks add to S. The computation has no loops.

    `balance` is "literal" for XShare's Algorithm 5, or "fill" or "level", our additions. Round t of Algorithm 5 adds
    the t-th best remaining expert of every rank. The round of an expert is therefore its position among the experts of
    its rank. A round takes place if S and all experts of earlier rounds together are fewer than the total target.
    `held` [1, N] marks the experts of exact rows, which do not count.
    """
    counted = selected if held is None else selected & ~held.squeeze(0)
    remaining = (utility > 0) & ~selected
    keys = _rank(utility, ~remaining)
    same_rank = rank_of_expert.unsqueeze(1) == rank_of_expert
    round_of = (same_rank & (keys.unsqueeze(1) < keys)).sum(1)
    if balance in ("fill", "level"):
        load = (same_rank & counted).sum(1)
        most: int | torch.Tensor = target
        # Exact rows count here, because the step waits for the fullest rank.
        if balance == "level":
            most = (same_rank & selected).sum(1).amax().clamp_min(target)
        return remaining & (load + round_of < most)
    earlier = (remaining & (round_of < round_of.unsqueeze(1))).sum(1)
    return remaining & (counted.sum() + earlier < target * (rank_of_expert.amax() + 1))


def _add_ranked(rows: Rows, plan: SelectionPlan, selected: torch.Tensor) -> None:
    """Add the best experts of the plan's ranking, for the batch or for each request."""
    groups = rows.num_requests if plan.scope == "request" else 1
    held = _find_held(rows, groups)
    if plan.ranking == "votes":
        mark(selected, *_rank_by_votes(rows, plan, groups, held))
        return
    assert plan.budget is not None
    if plan.ranking == "static":
        assert plan.order is not None
        utility = _rank_static(plan.order, selected.device).expand(groups, -1)
    else:
        utility = _compute_utility(rows, plan.utility, groups, _find_chance(rows, plan))
    selected |= _find_best(utility, plan.budget, held).any(0)


@cache
def _rank_static(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a utility [N] float64 for each expert: N for the first expert of `order`, down to 1 for the last.

    `lower_first` explains the cache.
    """
    places = {expert: place for place, expert in enumerate(order)}
    ranks = [len(order) - places[j] for j in range(len(order))]
    return torch.tensor(ranks, dtype=torch.float64, device="cpu").to(device)


def _rank_by_votes(
    rows: Rows, plan: SelectionPlan, groups: int, held: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids, most voted first, and a mask of the ids to keep (Lynx 4.2). Both have the shape [groups, N].

    `held` marks the experts of exact rows, which get no votes.
    """
    votes = _sum_at_own(rows, rows.silence(rows.own.live).double(), groups)
    if held is not None:
        votes.masked_fill_(held, 0.0)
    utility, by_utility = _rank(_compute_utility(rows, "full", groups), held).sort(dim=1, descending=True)
    votes, order = votes.gather(1, by_utility).sort(dim=1, descending=True, stable=True)
    live = (votes > 0) | (utility.gather(1, order) >= 1)
    if plan.drop is None:
        assert plan.budget is not None
        live[:, max(plan.budget, rows.top_k) :] = False
    else:
        retain = ((votes > 0).sum(1, keepdim=True) - plan.drop).clamp_min(rows.top_k)
        live &= torch.arange(rows.num_experts, device=live.device) < retain
    return by_utility.gather(1, order), live


def _follow_voters(rows: Rows, plan: SelectionPlan, confidence: float, selected: torch.Tensor) -> None:
    """Add the experts for which the most confident rows vote (Lynx 4.3).

    If S then has fewer experts than the model's top-k, add the best other experts by utility.
    """
    voters, is_voter = _rank_by_confidence(rows, confidence, plan.max_voters)
    experts, live = rows.own.experts[voters], rows.own.live[voters] & is_voter.unsqueeze(1)
    votes = torch.zeros_like(selected, dtype=torch.int64).index_add_(0, experts.view(-1), live.long().view(-1))
    selected |= votes >= plan.min_votes
    mark(selected, experts[:, 0], live[:, 0])
    keys, rest = _rank(_compute_utility(rows, "full", 1).squeeze(0), selected).topk(rows.top_k)
    position = torch.arange(rows.top_k, device=keys.device)
    mark(selected, rest, (keys >= 1) & (position < rows.top_k - selected.sum()))


def _rank_by_confidence(rows: Rows, confidence: float, max_voters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most confident rows [m], best first, and a mask [m] bool of the rows that vote.

    If no row is confident enough, only the first of these rows votes.
    """
    fixed = to_fixed_point(rows.measures)
    best, total = fixed.amax(1), fixed.sum(1)
    share = best / total.clamp_min(TINY)
    sure = (best >= confidence * total) & (total > 0)
    for out in (None if rows.valid is None else ~rows.valid, rows.exact):
        if out is not None:
            sure &= ~out.squeeze(1)
            share.masked_fill_(out.squeeze(1), -1.0)
    any_sure = sure.any()
    share, order = share.masked_fill_(any_sure & ~sure, -1.0).sort(descending=True, stable=True)
    position = torch.arange(len(share), device=share.device)
    is_voter = (share >= 0) & (any_sure | (position == 0))
    return order[:max_voters], is_voter[:max_voters]
