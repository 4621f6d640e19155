"""Whether a schedule fits a model and the server of it: told from their configuration, without weights."""

from typing import Any

from ..depth import is_on as chooses_depth
from ..policies import VANILLA
from ..policies.bounds import can_drop
from ..policies.plan import AUTO, SelectionPlan
from ..policies.schedule import Schedule
from ..refusal import ExpertPolicyError, refusal
from ..selection.mask import check_maskable
from ..types import Router
from ..upstream.batches import Batches, read_batches
from ..upstream.server import attention_dp_size, routes_own_rows, spell
from .exact import check_rule
from .experts import ranks_logits
from .moe_model import MoeModel
from .runners import TABLE


def check_schedule(
    schedule: Schedule | None,
    model: MoeModel,
    config: Any,
    names_runner: bool = True,
    requests: int | None = None,
) -> tuple[list[SelectionPlan], list[str]]:
    """Return (every plan that the model's layers can get, what to warn of), of resolved arguments alone: alike for a
    server that starts and one that runs. `schedule` is None where padding rows alone are masked, `names_runner` False
    where SGLang has chosen the MoE runner, `requests` as in `read_batches`. Raises `ExpertPolicyError` for a schedule
    that the model or the server does not fit.
    """
    if schedule is not None:
        check_rule(schedule.exact, config)
    plans: list[SelectionPlan] = [] if schedule else [VANILLA]
    warnings: list[str] = []
    for part in schedule.parts if schedule else ():
        check_rows(part, config)
        _check_size(part, config, requests)
        found = build_plans(part, model, config.ep_size)
        _check_plans(found, model, config)
        plans += found
        router = Router(top_k=model.top_k)
        lines: list[str] = []
        if not all(can_drop(plan, router, model.num_experts, ranks=config.ep_size) for plan in found):
            lines.append(f"a plan of it never drops one of {model.num_experts} experts, so that it only costs time")
        if over := sorted({plan.kmax for plan in found if plan.kmax and plan.kmax > model.num_experts}):
            lines.append(f"kmax = {over[-1]} has no effect beyond the model's {model.num_experts} experts")
        warnings += [f"--expert-policy {part.policy}: {line}" for line in lines]
    warnings = list(dict.fromkeys(warnings))  # `observe` has up to hundreds of plans with the same one
    flag = f"--expert-policy {schedule.policy}" if schedule else "--mask-padding-experts"
    _check_runner(plans, model, config, None if names_runner else flag)
    return plans, warnings


def _check_runner(plans: list[SelectionPlan], model: MoeModel, config: Any, flag: str | None) -> None:
    """Refuse what the MoE runner does not take, as far as flags tell; by `flag` where SGLang has chosen it."""
    runner = spell(config.moe_runner_backend)
    try:
        for plan in plans if ranks_logits(config) else ():
            check_maskable(plan, Router(top_k=model.top_k, scoring=model.scoring, renormalize=model.renormalize))
        takes_kmax = [row.takes_kmax for row in TABLE if row.name == runner]  # of each kernel; none is behind auto
        for plan in plans if takes_kmax and not any(takes_kmax) else ():
            if plan.columns(Router(top_k=model.top_k)) != model.top_k:
                raise ValueError(f"kmax = {plan.kmax}: MoE runner {runner} uses top-k; allowed is {model.top_k}")
    except ValueError as error:
        if flag is None:
            raise refusal("--moe-runner-backend", runner, str(error)) from None
        reason = f"{error}; SGLang runs this model's experts with {runner} here"
        raise ExpertPolicyError(flag, None, reason) from None


def check_rows(schedule: Schedule, config: Any) -> None:
    """Raise `ExpertPolicyError` for key `rows` where a rank has no rows of its own, or none of whole requests."""
    if schedule.rows != "rank":
        return
    flag = "--expert-policy-config rows"
    if not routes_own_rows(config):
        raise refusal(flag, "rank", "without --moe-a2a-backend a router sees the rows of all ranks; allowed is batch")
    share = config.tp_size // attention_dp_size(config)
    if share > 1 and config.speculative_algorithm is not None:
        reason = f"{share} ranks divide the rows of a batch, which splits requests; allowed with speculation is batch"
        raise refusal(flag, "rank", reason)


def _check_size(schedule: Schedule, config: Any, requests: int | None = None) -> None:
    """Raise `ExpertPolicyError` for a server whose every batch is too small or too large for the policy; `requests` as
    in `read_batches`.
    """
    missed = find_missed(schedule, config, requests)
    if missed is not None:
        limits, batches = missed
        reason = f"no step of this server has so many rows; allowed is a range that meets some ({batches})"
        raise refusal("--expert-policy", f"{schedule.policy} with {limits}", reason)


def find_missed(schedule: Schedule, config: Any, requests: int | None = None) -> tuple[str, Batches] | None:
    """Return (the policy's limits in words, the server's batches) if no batch is within the limits, else None;
    `requests` as in `read_batches`.
    """
    batches = read_batches(config, schedule.rows, requests)
    if batches.meet(schedule.min_rows, schedule.max_rows):
        return None
    last = "" if schedule.max_rows is None else f" to max_rows = {schedule.max_rows}"
    return f"min_rows = {schedule.min_rows}{last}", batches


def build_plans(schedule: Schedule, model: MoeModel, ranks: int = 1) -> list[SelectionPlan]:
    """Every plan of the model's layers on so many ranks. Raises `ExpertPolicyError` for one that does not fit."""
    try:
        plans = schedule.plans(range(model.num_layers))
        for plan in plans:
            plan.check(Router(model.top_k, renormalize=model.renormalize), model.num_experts, ranks=ranks)
    except ValueError as error:
        raise ExpertPolicyError("--expert-policy", schedule.policy, str(error)) from None
    return plans


def _check_plans(plans: list[SelectionPlan], model: MoeModel, config: Any) -> None:
    """Refuse a plan that the server does not fit."""
    for plan in plans:
        if plan.target_per_rank is not None and config.ep_num_redundant_experts:
            reason = "target_per_rank needs every expert on one rank; allowed is 0"
            raise refusal("--ep-num-redundant-experts", config.ep_num_redundant_experts, reason)
        if plan.estimates:
            _check_estimate(config)
        if plan.kmax not in (None, model.top_k) and routes_own_rows(config):
            reason = f"kmax = {plan.kmax} gives it rows of another width; allowed is none"
            raise refusal("--moe-a2a-backend", spell(config.moe_a2a_backend), reason)
        for flag in ("enable_return_routed_experts", "enable_paged_experts"):
            if plan.kmax not in (None, model.top_k) and getattr(config, flag, False):
                reason = f"kmax = {plan.kmax} gives it rows of another width; allowed is off"
                raise refusal(f"--{flag.replace('_', '-')}", "on", reason)


def _check_estimate(config: Any) -> None:
    """Refuse to estimate drafts where ranks would come to different numbers, or accepted lengths tell none."""
    follows_upstream = config.speculative_adaptive and not chooses_depth(config)
    reasons = (
        (attention_dp_size(config) > 1, "data-parallel attention: each rank counts its own requests"),
        (routes_own_rows(config), "an all-to-all backend: it has not been executed with one"),
        (follows_upstream, "--speculative-adaptive by SGLang's own choice: its drafts differ in length"),
    )
    for applies, reason in reasons:
        if applies:
            raise refusal("--expert-policy-config acceptance", AUTO, f"{reason}; allowed with that is a number")
