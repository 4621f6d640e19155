"""Bounds that hold for any logits: whether a plan can change a step, and how many experts can be active at most."""

from dataclasses import replace

from ..types import Router
from .plan import SelectionPlan

OWN_UTILITIES = ("topk", "squared")
"""Utilities that are zero for every expert outside a row's own top-k."""


def can_drop(plan: SelectionPlan, router: Router, num_experts: int, ranks: int = 1) -> bool:
    """Return False if the plan never removes an expert from a row's own top-k. Such a plan only costs time.

    The result False holds for every batch. `ranks` is the number of expert-parallel ranks.
    """
    k0 = plan.warm_up(router)
    if k0 >= router.top_k and plan.p == 1 and plan.warm_rows is None:
        return bool(plan.beta)
    if not plan.uses_selected or not _reaches_own(plan, router, num_experts) or plan.acceptance < 1:
        # With `acceptance` < 1 all utilities of a deep draft token may round to 0.
        return True
    total = max(plan.budget or 0, (plan.target_per_rank or 0) * ranks)
    added = max(_count_added(plan, num_experts), plan.add_per_request)
    sure = _count_sure(plan, router)
    keeps_all = total >= num_experts or added >= num_experts - sure or plan.drop == 0
    return not keeps_all


def can_change(
    plan: SelectionPlan,
    router: Router,
    num_experts: int,
    rows: int,
    tokens_per_request: int = 1,
    ranks: int = 1,
    slots: int | None = None,
) -> bool:
    """Return False if the plan cannot change a step of `rows` rows: each row keeps the model's own top-k and weights.

    The step has no padding rows. The result False holds for any logits, even if some rows are exact. With paged
    experts, `slots` is the number of page slots. The result False then holds whatever experts the page slots contain.
    The result True may be wrong. A wrong True only costs the time of a selection.

    Utilities are rounded to multiples of 2**-20. The utility of an expert becomes 0 if no row's score for the expert is
    above 2**-21. With utility `squared` it becomes 0 if no row's weight is above 2**-10.5 = 0.0007. A step may drop an
    expert with utility 0 although this function returns False.
    """
    if plan.columns(router) != router.top_k:
        return True
    wanted = num_experts if plan.utility not in OWN_UTILITIES else min(num_experts, rows * router.top_k)
    if plan.takes_residents and slots is not None and slots < wanted:
        return True
    if plan.weighs(tokens_per_request):
        return True
    holds_all = _holds_own(plan, router, num_experts, rows, tokens_per_request, ranks)
    return not holds_all and can_drop(replace(plan, acceptance=1.0), router, num_experts, ranks)


def _holds_own(
    plan: SelectionPlan, router: Router, num_experts: int, rows: int, tokens_per_request: int, ranks: int
) -> bool:
    """Return whether a budget is large enough to select every expert of each row's own top-k.

    The result is False if other experts may rank before the experts of the rows' top-k. This can happen with ranking
    `static`. It can also happen with ranking `router` and utility `full`.
    """
    takes_own_first = plan.ranking == "votes" or (plan.ranking == "router" and plan.utility in OWN_UTILITIES)
    if not (plan.uses_selected and takes_own_first and _reaches_own(plan, router, num_experts)):
        return False
    sure = _count_sure(plan, router)
    # Among all draft trees, a chain has the fewest rows with a warm-up.
    warm = min(plan.warm_rows or tokens_per_request, tokens_per_request)
    beyond = tokens_per_request * router.top_k - warm * sure
    by_request = plan.scope == "request"
    enough = {
        "add_per_request": min(beyond, num_experts - sure),
        "add": min(rows // tokens_per_request * beyond, num_experts - sure),
        "budget": min((tokens_per_request if by_request else rows) * router.top_k, num_experts),
    }
    # Only with balance `literal` does S always have as many experts as all targets together, if so many have utility.
    if plan.balance == "literal":
        enough["target_per_rank"] = -(-min(rows * router.top_k, num_experts) // ranks)
    given = {key: getattr(plan, key) or 0 for key in enough} | {"add": _count_added(plan, num_experts)}
    return any(given[key] and given[key] >= n for key, n in enough.items())


def _reaches_own(plan: SelectionPlan, router: Router, num_experts: int) -> bool:
    """Return whether a row can get all experts of its own top-k.

    If the router has `quota_groups`, the last of these experts may be anywhere in the row's ranking.
    """
    last = router.top_k if router.quota_groups is None else num_experts
    return plan.columns(router) >= router.top_k and (plan.max_rank or num_experts) >= last


def _count_sure(plan: SelectionPlan, router: Router) -> int:
    """Return the smallest number of experts in a row's warm-up. With `p` < 1 a warm-up may end after one expert."""
    k0 = plan.warm_up(router)
    return k0 if plan.p == 1 else min(k0, 1)


def _count_added(plan: SelectionPlan, num_experts: int) -> int:
    """Return the smallest number of experts that the batch adds if enough experts have utility."""
    return plan.add + ((plan.max_add or num_experts) if plan.mass == 1 else 0)


def max_active(
    plan: SelectionPlan,
    router: Router,
    num_experts: int,
    rows: int,
    tokens_per_request: int = 1,
    slots: int | None = None,
) -> int:
    """Return the largest number of experts that can be active in a step of `rows` rows. The result is at least 1.

    The step has no exact rows. Some budgets have no fixed size, because they depend on the logits or on the ranks.
    These are `drop`, `confidence`, `target_per_rank`, and `mass` without `max_add`. Such a budget does not lower
    the result below the number of experts that the rows can use at most.

    `slots` is the number of page slots, or None if the batch does not mark the loaded experts. A plan may select loaded
    experts that no budget counts. It then selects at most `slots` experts, unless the warm-ups and `add_per_request`
    alone need more. Each row that can be rescued may add one expert.
    """
    most = min(num_experts, rows * plan.columns(router))
    requests = rows // tokens_per_request
    # `warm_rows` does not lower this number, because a draft tree may have no rows at that depth or deeper.
    held = rows * plan.warm_up(router) + requests * plan.add_per_request
    rescued = rows if plan.can_rescue else 0
    if slots is not None and plan.takes_residents:
        return max(min(most, max(held, slots) + rescued), 1)
    unbounded = plan.mass is not None and plan.max_add is None
    if unbounded or plan.drop is not None or plan.confidence is not None or plan.target_per_rank:
        return max(most, 1)
    budget = plan.budget or 0
    if plan.ranking == "votes":
        budget = max(budget, router.top_k)
    held += plan.add + (plan.max_add or 0) + budget * (requests if plan.scope == "request" else 1)
    return max(min(most, held + rescued), 1)


def fits_slots(
    plan: SelectionPlan | None, router: Router, num_experts: int, rows: int, tokens_per_request: int, slots: int
) -> bool:
    """Return whether at most `slots` experts are active in a step of `rows` rows, for any logits.

    SGLang captures and replays CUDA graphs only for such steps. If `plan` is None, the model's own router chooses the
    experts. The step has no exact rows, because a server with paged experts refuses exact requests.
    """
    if rows * router.top_k <= slots:
        return True
    return plan is not None and max_active(plan, router, num_experts, rows, tokens_per_request, slots=slots) <= slots


def open_up(plan: SelectionPlan, router: Router) -> SelectionPlan:
    """Return a variant of the plan that uses the same kernel and routes as the model does.

    Raises ValueError if the plan's number of columns is not the model's top-k.
    """
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax} columns: must be {router.top_k}, as in the model's own routing")
    return replace(plan, k0=None, p=1.0, beta=None, warm_rows=None)
