"""Checks that a policy's schedule fits the model and the server. The checks do not need the model's weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..depth import is_on as chooses_depth
from ..policies import VANILLA
from ..policies.bounds import can_drop
from ..policies.plan import AUTO, SelectionPlan
from ..policies.schedule import Schedule
from ..refusal import ExpertPolicyError, refusal, refuse
from ..selection.mask import check_maskable
from ..types import Router
from ..upstream.batches import Batches, read_batches
from ..upstream.server import attention_dp_size, pages_experts, routes_own_rows, spell
from .exact import check_rule
from .experts import ranks_logits
from .moe_model import MoeModel
from .paging import limit_batches
from .runners import TABLE


def check_schedule(
    schedule: Schedule | None,
    model: MoeModel,
    config: Any,
    names_runner: bool = True,
    find_batches: Callable[[str], Batches] | None = None,
) -> tuple[list[SelectionPlan], list[str]]:
    """Return all plans of the schedule for the model's layers, and a list of warnings.

    The server calls this function when it starts and when it switches policies. With the same MoE runner and the same
    batch sizes, both calls have the same result.

    - `schedule` is None if the server only masks padding rows.
    - `config` contains the resolved arguments.
    - `names_runner` is False if SGLang has chosen the MoE runner.
    - `find_batches` returns the server's batch sizes for a value of the key `rows`. By default `read_batches` predicts
      them.

    Raises `ExpertPolicyError` if the schedule does not fit the model or the server.
    """
    if schedule is not None:
        check_rule(schedule.exact, config)
    plans: list[SelectionPlan] = [] if schedule else [VANILLA]
    warnings: dict[str, None] = {}  # a dict, because hundreds of plans may have the same warning
    router, experts = Router(model.top_k, renormalize=model.renormalize), model.num_experts
    find_batches = find_batches or partial(read_batches, config)
    for part in schedule.parts if schedule else ():
        check_rows(part, config)
        batches = limit_batches(find_batches(part.rows), schedule, config, model.top_k, experts)
        if missed := find_missed(part, batches):
            reason = "no step of this server has a number of rows in this range; must include one of its batch sizes"
            reason += f" ({batches})"
            raise refusal("--expert-policy", f"{part.policy} with {missed}", reason)
        found = _build_plans(part, model, router, config.ep_size)
        _check_plans(found, model, config)
        plans += found
        warnings |= dict.fromkeys(_find_warnings(part, found, router, experts, config))
    flag = f"--expert-policy {schedule.policy}" if schedule else "--mask-padding-experts"
    _check_runner(plans, model, router, config, None if names_runner else flag)
    return plans, list(warnings)


def _find_warnings(
    schedule: Schedule, plans: list[SelectionPlan], router: Router, num_experts: int, config: Any
) -> Iterator[str]:
    """Yield a warning for each key of the schedule without effect, and for plans without effect."""
    name = f"--expert-policy {schedule.policy}"
    if not all(can_drop(plan, router, num_experts, ranks=config.ep_size) for plan in plans):
        yield f"{name}: one of its plans never drops any of {num_experts} experts, and only costs time"
    if over := [plan.kmax for plan in plans if plan.kmax and plan.kmax > num_experts]:
        yield f"{name}: kmax = {max(over)} has no effect beyond the model's {num_experts} experts"
    if any(plan.free_residents for plan in plans) and not pages_experts(config):
        yield f"{name}: free_residents has no effect without --enable-paged-experts"


def _check_runner(plans: list[SelectionPlan], model: MoeModel, router: Router, config: Any, flag: str | None) -> None:
    """Refuse a plan that the MoE runner does not support. This check uses only the arguments, not the loaded layers.

    If SGLang has chosen the runner, the error names `flag`. If the user has chosen it, `flag` is None.
    """
    runner, ranks = spell(config.moe_runner_backend), ranks_logits(config)
    takes_kmax = [row.takes_kmax for row in TABLE if row.name == runner]  # one value for each kernel; none for auto
    try:
        for plan in plans:
            if ranks:
                check_maskable(plan, replace(router, scoring=model.scoring))
            if takes_kmax and not any(takes_kmax) and plan.columns(router) != router.top_k:
                raise ValueError(f"kmax = {plan.kmax}: MoE runner {runner} uses top-k; must be {router.top_k}")
    except ValueError as error:
        if flag is None:
            raise refusal("--moe-runner-backend", runner, str(error)) from None
        raise ExpertPolicyError(flag, None, f"{error}; SGLang runs this model's experts with {runner} here") from None


def check_rows(schedule: Schedule, config: Any) -> None:
    """Raise `ExpertPolicyError` if `rows` is "rank" on a server whose ranks do not route their own requests."""
    if schedule.rows != "rank":
        return
    flag = "--expert-policy-config rows"
    if not routes_own_rows(config):
        raise refusal(flag, "rank", "without --moe-a2a-backend a router gets the rows of all ranks; must be batch")
    share = config.tp_size // attention_dp_size(config)
    if share > 1 and config.speculative_algorithm is not None:
        reason = f"{share} ranks divide the rows of a batch, which splits requests; must be batch with speculation"
        raise refusal(flag, "rank", reason)


def find_missed(schedule: Schedule, batches: Batches) -> str | None:
    """Return the schedule's limits of rows, as text, if no step of the server is within these limits.

    Otherwise return None.
    """
    if batches.meet(schedule.min_rows, schedule.max_rows):
        return None
    last = "" if schedule.max_rows is None else f" to max_rows = {schedule.max_rows}"
    return f"min_rows = {schedule.min_rows}{last}"


def _build_plans(schedule: Schedule, model: MoeModel, router: Router, ranks: int) -> list[SelectionPlan]:
    """Return the plans of the model's layers. Raises `ExpertPolicyError` if a plan does not fit the model."""
    try:
        plans = schedule.plans(range(model.num_layers))
        for plan in plans:
            plan.check(router, model.num_experts, ranks=ranks)
    except ValueError as error:
        raise ExpertPolicyError("--expert-policy", schedule.policy, str(error)) from None
    return plans


def _check_plans(plans: list[SelectionPlan], model: MoeModel, config: Any) -> None:
    """Raise `ExpertPolicyError` if a plan does not fit the server's arguments."""
    for plan in plans:
        if plan.target_per_rank is not None and config.ep_num_redundant_experts:
            reason = "target_per_rank needs each expert on exactly one rank; must be 0"
            raise refusal("--ep-num-redundant-experts", config.ep_num_redundant_experts, reason)
        follows_upstream = config.speculative_adaptive and not chooses_depth(config)
        if plan.estimates:  # all ranks need the same estimate, which comes from accepted lengths
            for applies, reason in (
                (attention_dp_size(config) > 1, "with data-parallel attention each rank counts its own requests"),
                (routes_own_rows(config), "the estimate is untested with an all-to-all backend"),
                (follows_upstream, "drafts of --speculative-adaptive by SGLang's own choice differ in length"),
            ):
                if applies:
                    raise refusal("--expert-policy-config acceptance", AUTO, f"{reason}; must be a number")
        if plan.kmax in (None, model.top_k):
            continue
        reason = f"kmax = {plan.kmax} is not the model's top-k"
        if routes_own_rows(config):
            raise refuse("moe_a2a_backend", spell(config.moe_a2a_backend), f"{reason}; must be none")
        for name in ("enable_return_routed_experts", "enable_paged_experts"):
            if getattr(config, name, False):
                raise refuse(name, True, f"{reason}; must be off")
