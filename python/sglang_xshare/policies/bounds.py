"""Bounds of a plan for any logits: whether it can change a step, and the most experts that it leaves active."""

from dataclasses import replace

from ..types import Router
from .plan import SelectionPlan

OWN_UTILITIES = ("topk", "squared")
"""Utilities that are zero outside a row's own top-k."""


def can_drop(plan: SelectionPlan, router: Router, num_experts: int, ranks: int = 1) -> bool:
    """Return False if no batch can lose an expert to this plan on `ranks` ranks: such a plan only costs time."""
    k0 = plan.warm_up(router)
    if k0 >= router.top_k and plan.p == 1 and plan.warm_rows is None:
        return bool(plan.beta)
    if not plan.uses_selected or not _reaches_own(plan, router, num_experts) or plan.acceptance < 1:
        return True  # with `acceptance` < 1 all utilities of a late draft may round to 0
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
    """Return False if a step of `rows` rows without padding surely has the model's own top-k and weights.

    False holds for any logits, any exact rows and, with paged experts, any experts in the `slots` slots. A True for
    a step that the plan does not change only costs the time of a selection.

    Utilities are rounded to multiples of 2**-20. An expert that no row scores above 2**-21 (with utility squared, no
    weight above 2**-10.5 = 0.0007) has utility 0, and may be dropped despite a False.
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
    """Return whether a budget is so large that S contains the own top-k of each of `rows` rows.

    Utility `full` does not qualify, because it may rank other experts before those of the rows' top-k.
    """
    takes_own_first = plan.ranking == "votes" or (plan.ranking == "router" and plan.utility in OWN_UTILITIES)
    if not (plan.uses_selected and takes_own_first and _reaches_own(plan, router, num_experts)):
        return False
    sure = _count_sure(plan, router)
    # Of all trees a chain has the fewest rows with a warm-up.
    warm = min(plan.warm_rows or tokens_per_request, tokens_per_request)
    beyond = tokens_per_request * router.top_k - warm * sure
    by_request = plan.scope == "request"
    enough = {
        "add_per_request": min(beyond, num_experts - sure),
        "add": min(rows // tokens_per_request * beyond, num_experts - sure),
        "budget": min((tokens_per_request if by_request else rows) * router.top_k, num_experts),
    }
    if plan.balance == "literal":  # only here the sum of the ranks' targets bounds S from below
        enough["target_per_rank"] = -(-min(rows * router.top_k, num_experts) // ranks)
    given = {key: getattr(plan, key) or 0 for key in enough} | {"add": _count_added(plan, num_experts)}
    return any(given[key] and given[key] >= n for key, n in enough.items())


def _reaches_own(plan: SelectionPlan, router: Router, num_experts: int) -> bool:
    """Return whether a row can get its whole own top-k. With `quota_groups` its last expert may have any place."""
    last = router.top_k if router.quota_groups is None else num_experts
    return plan.columns(router) >= router.top_k and (plan.max_rank or num_experts) >= last


def _count_sure(plan: SelectionPlan, router: Router) -> int:
    """Return the fewest experts of a row's warm-up; with a share `p` the warm-up may end after the first."""
    k0 = plan.warm_up(router)
    return k0 if plan.p == 1 else min(k0, 1)


def _count_added(plan: SelectionPlan, num_experts: int) -> int:
    """Return the fewest experts that the batch adds while experts with utility are left."""
    return plan.add + ((plan.max_add or num_experts) if plan.mass == 1 else 0)


def max_active(
    plan: SelectionPlan,
    router: Router,
    num_experts: int,
    rows: int,
    tokens_per_request: int = 1,
    slots: int | None = None,
) -> int:
    """Return the most active experts of `rows` rows, none of which is exact; at least 1.

    A budget whose size depends on the logits or on the ranks (`mass` without `max_add`, `drop`, `confidence`,
    `target_per_rank`) does not lower the result.

    If the batch names residents in `slots` slots and the plan takes residents, the result is at most `slots`, unless
    warm-up, requests and rescued rows alone can bring more experts.
    """
    most = min(num_experts, rows * plan.columns(router))
    requests = rows // tokens_per_request
    # `warm_rows` does not lower this number: a tree may have no row that deep.
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

    SGLang captures and replays graphs of such steps only. Without a plan the model routes. A server with paged experts
    has no exact rows.
    """
    if rows * router.top_k <= slots:
        return True
    return plan is not None and max_active(plan, router, num_experts, rows, tokens_per_request, slots=slots) <= slots


def open_up(plan: SelectionPlan, router: Router) -> SelectionPlan:
    """Return the plan with which `plan`'s kernel routes as the model. Raises ValueError unless it has top-k columns."""
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax} columns: must be {router.top_k}, as in the model's own routing")
    return replace(plan, k0=None, p=1.0, beta=None, warm_rows=None)
