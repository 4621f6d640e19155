"""Budgets that are served without an effect, each a warning with its number."""

from __future__ import annotations

from typing import Any

from ...plan import KEYS, SelectionPlan
from ...policies.schedule import Schedule
from ...types import Router
from ..upstream import attention_dp_size, spell
from .moe_model import MoeModel


def largest_batch(config: Any) -> tuple[int, str] | None:
    """(requests, what limits them) of the largest batch of a server with these resolved arguments: those it runs at
    once, else those it captures a graph for. None where it does neither.
    """
    if config.max_running_requests:
        return config.max_running_requests, "--max-running-requests"
    graphs = getattr(config, "cuda_graph_config", None)
    if graphs is None or not graphs.decode.max_bs or spell(graphs.decode.backend) == "disabled":
        return None
    return graphs.decode.max_bs * attention_dp_size(config), "the largest batch captured:"


def list_idle_budgets(
    schedule: Schedule,
    plans: list[SelectionPlan],
    model: MoeModel,
    ranks: int = 1,
    batch: tuple[int, str] | None = None,
    tokens: int = 1,
) -> list[str]:
    """A warning for each of a schedule's plans that drops no expert of a model on `ranks` expert-parallel ranks, ever
    or up to its largest `batch` (as `largest_batch` says) of `tokens` a request; and for `mass` beside `add`.
    """
    router = Router(top_k=model.top_k)
    start = f"--expert-policy {schedule.policy}: "
    warnings = []
    for plan in plans:
        if not plan.can_drop(router, model.num_experts, ranks=ranks):
            warnings.append(f"this plan ({_spell(plan)}) never drops one of {model.num_experts} experts")
            continue
        if plan.mass and plan.add:
            warnings.append(
                f"mass = {plan.mass:g} beside add = {plan.add}: the batch adds {plan.add} experts first, and mass only "
                "ever adds more; add = 0 leaves it to mass"
            )
        if batch is not None:
            requests, limit = batch
            rows = _largest_rows(schedule, plan, model, requests * tokens)
            need = rows and _idle_from(plan, router, rows, tokens, model.num_experts, ranks)
            if need:
                key, enough = need
                warnings.append(
                    f"{key} = {getattr(plan, key)}: {enough} hold all that {rows} rows want, the most it is for "
                    f"({limit} {requests}), so that this plan never drops an expert"
                )
    return [start + warning for warning in dict.fromkeys(warnings)]


def _spell(plan: SelectionPlan) -> str:
    """The keys of a plan that are not the algebra's defaults."""
    own = {name: getattr(plan, name) for name in KEYS}
    return ", ".join(f"{name} = {value}" for name, value in own.items() if value != getattr(SelectionPlan, name))


def _largest_rows(schedule: Schedule, plan: SelectionPlan, model: MoeModel, most: int) -> int:
    """The most router rows, of `most`, that a step under this plan can have; 0 where it has none."""
    most = min(most, schedule.max_tokens or most)
    # A plan changes only where an override begins or ends.
    ends = {most, *(n for override in schedule.by_batch for n in (override.first - 1, override.last))}
    sizes = sorted((n for n in ends if schedule.min_tokens <= n <= most), reverse=True)
    layers = range(model.num_layers)
    return next((n for n in sizes if any(schedule.plan(layer, n) == plan for layer in layers)), 0)


def _idle_from(
    plan: SelectionPlan, router: Router, rows: int, tokens: int, num_experts: int, ranks: int
) -> tuple[str, int] | None:
    """(a budget of the plan, how many experts of it always hold every row's own top-k), where it has as many.

    Only where it takes first what rows have in their top-k: utility over all experts may prefer others.
    """
    takes_own_first = plan.ranking == "votes" or (plan.ranking == "router" and plan.utility == "topk")
    if (
        not (plan.uses_selected and takes_own_first)
        or min(plan.columns(router), plan.max_rank or num_experts) < router.top_k
    ):
        return None
    k0 = plan.warm_up(router)
    warm = k0 if plan.p == 1 else min(k0, 1)
    beyond = router.top_k - warm
    by_request = plan.scope == "request"
    enough = {
        "add_per_request": min(tokens * beyond, num_experts - warm),
        "add": min(rows * beyond, num_experts - warm),
        "budget": min((tokens if by_request else rows) * router.top_k, num_experts),
    }
    if plan.balance == "literal":  # its ranks go on until S has the target of all ranks together
        enough["target_per_rank"] = -(-min(rows * router.top_k, num_experts) // ranks)
    given = {key: getattr(plan, key) or 0 for key in enough}
    return next(((key, n) for key, n in enough.items() if given[key] and given[key] >= n), None)
