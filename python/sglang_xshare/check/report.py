"""What is told of a resolution: whether it is served, and what the server would run."""

from typing import Any

from ..compatibility.architectures import EXECUTED
from ..compatibility.moe_model import MoeModel, read_model
from ..compatibility.schedule import check_schedule
from ..policies import VANILLA, bounds, get_policy
from ..policies.description import describe as describe_plan
from ..refusal import ExpertPolicyError
from ..selection import cpu_call, triton_kernel
from ..types import Batch, Router
from ..upstream.batches import list_captured, read_batches
from ..upstream.server import attention_dp_size, model_config, resolved, spell
from .resolve import Resolution

COMPILED = {"cuda": ("triton", triton_kernel.supports), "cpu": ("cpu", cpu_call.supports)}
"""Device -> what selects there, and whether it serves a plan; torch does the rest."""


def describe(resolution: Resolution) -> dict[str, Any]:
    """The report as JSON would have it; what could not be found out is absent."""
    report: dict[str, Any] = {
        "served": not resolution.refusals,
        "refusals": [{"by": who, "says": says} for who, says in resolution.refusals],
        "warnings": [{"by": who, "says": says} for who, says in resolution.warnings],
    }
    if resolution.server_args is not None:
        report["policy"] = _describe_policy(resolution)
    if not resolution.finished:
        return report
    config = resolved(resolution.server_args)
    report |= _describe_server(config)
    try:
        model = read_model(model_config(resolution.server_args), resolution.server_args.model_path)
    except ExpertPolicyError:
        return report
    report["model"] = {
        "architecture": model.architecture,
        "executed_as": EXECUTED.get(model.architecture),
        "layers": model.num_layers,
        "experts": model.num_experts,
        "top_k": model.top_k,
    }
    return report | _describe_selection(resolution, model, config, report["capture_sizes"])


def _describe_policy(resolution: Resolution) -> dict[str, Any] | None:
    """The policy with the keys in force, defaults included; `keys` is None of one refused. None without a policy."""
    if resolution.arguments is None:
        return None
    schedule = resolution.arguments.schedule
    if schedule is None:
        asked = resolution.server_args.expert_policy
        return None if asked is None else {"policy": asked.partition(":")[0], "keys": None}
    keys = get_policy(schedule.policy).resolve(schedule.keys)
    return {"policy": schedule.policy, "keys": {name: value for name, value in keys.items() if value is not None}}


def _describe_server(config: Any) -> dict[str, Any]:
    """What `auto` became. Attention: of prefill and decode, which may differ."""
    attention = [
        getattr(config, name, None) or config.attention_backend
        for name in ("prefill_attention_backend", "decode_attention_backend")
    ]
    return {
        "device": str(config.device),
        "moe_runner": spell(config.moe_runner_backend),
        "attention": {"prefill": attention[0], "decode": attention[1]},
        "capture_sizes": list_captured(config),
    }


def _describe_selection(
    resolution: Resolution, model: MoeModel, config: Any, capture_sizes: list[int]
) -> dict[str, Any]:
    """Whether the policy can drop an expert, and what selects at which captured batch size."""
    schedule = resolution.arguments.schedule if resolution.arguments else None
    if schedule is None:
        return {}
    try:
        plans, _ = check_schedule(schedule, model, config)
    except ExpertPolicyError:
        return {}
    text = model_config(resolution.server_args).hf_text_config
    groups = getattr(text, "n_group", None), getattr(text, "topk_group", None)
    router = Router(
        top_k=model.top_k,
        scoring=model.scoring,
        renormalize=model.renormalize,
        num_expert_group=groups[0] if all(groups) else None,
        topk_group=groups[1] if all(groups) else None,
    )
    tokens = config.speculative_num_draft_tokens or 1
    phase = "decode" if config.speculative_algorithm is None else "verify"
    batches = read_batches(config)
    compiled, supports = COMPILED.get(str(config.device), ("torch", triton_kernel.supports))
    found: dict[str, list[int]] = {"vanilla": [], "triton": [], "cpu": [], "torch": []}
    for size in capture_sizes or range(1, 17):
        rows = size * tokens * attention_dp_size(config)
        kind = compiled
        layers = range(model.num_layers)
        planned = {plan for layer in layers for plan in schedule.plans_for(layer, phase, rows)}
        shape = model.num_experts, rows, tokens, config.ep_size
        chosen = [plan for plan in planned - {VANILLA} if batches.pad(rows) or bounds.can_change(plan, router, *shape)]
        if not chosen:
            kind = "vanilla"
        elif not all(
            supports(plan, router, Batch(tokens_per_request=tokens), rows, model.num_experts) for plan in chosen
        ):
            kind = "torch"
        found[kind].append(size)
    dropping = [plan for plan in plans if bounds.can_drop(plan, router, model.num_experts, ranks=config.ep_size)]
    plan = describe_plan(schedule, model.top_k)
    return {"plan": plan, "selection": found, "plans": len(plans), "plans_that_can_drop": len(dropping)}
