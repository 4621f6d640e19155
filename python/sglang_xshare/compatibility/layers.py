"""The MoE layers of a loaded model, and the checks that each layer supports the policy's plans."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..policies import VANILLA
from ..policies.plan import SelectionPlan
from ..refusal import REFUSED, ExpertPolicyError, refusal, refuse
from ..selection.mask import check_maskable
from ..stage.frame import CurrentFrame
from ..stage.layer import DROPPED, FILLED, MASKED, Layer
from ..stage.placement import Placement
from ..upstream.configuration import NUM_EXPERTS, find_value
from ..upstream.paging import find_paging
from ..upstream.ranks import find_rank
from ..upstream.routing import (
    expert_locations,
    keep_sums,
    keeps_dropped,
    num_shared_slots,
    number_layer,
    read_output_format,
    routes_on,
)
from ..upstream.server import model_config, num_schedulers, resolved, routes_own_rows
from .arguments import Arguments, read_arguments
from .runners import TRITON, Runner, check_kernel, find_kernel

OUTPUTS = {FILLED: ("standard",), DROPPED: ("standard", "bypassed"), MASKED: ("triton_kernel", "bypassed")}
"""The output formats that a router may have. The keys are the conventions of MoE runners.

A "bypassed" output contains logits. If the convention is DROPPED, the stage returns expert ids and weights instead of
logits.
"""


def find_layers(model_runner: Any) -> tuple[Arguments, list[Layer]] | None:
    """Return the flags of the expert-selection stage and the MoE layers of a loaded model.

    Return None if the stage is off. Some MoE runners would select experts from the logits themselves. In layers with
    such a runner, the experts are set to add up the outputs of each row (see `keep_sums`). If a router or runner is not
    supported, or if the trace is no longer writable, the process prints one line and ends.
    """
    try:
        arguments = read_arguments(model_runner.server_args)
        if arguments is None:
            return None
        layers = read_layers(model_runner, arguments)
    except ExpertPolicyError as error:
        end_refused(error, resolved(model_runner.server_args))
    keep_sums(model_runner.model, {layer.layer_id for layer in layers if layer.runner_ranks_logits})
    return arguments, layers


def end_refused(error: ExpertPolicyError, config: Any) -> NoReturn:
    """End a scheduler process, without a traceback, after a check has refused the loaded model.

    Each tensor-parallel rank prints its number and the reason. If the server has several schedulers, the function
    raises the error instead, because their controller would wait forever for a scheduler that has ended.
    """
    if num_schedulers(config) > 1:
        raise error
    rank, size, _ = find_rank()
    print(f"rank {rank}: {error}" if size > 1 else error, file=sys.stderr, flush=True)
    raise SystemExit(REFUSED) from None


def read_layers(model_runner: Any, arguments: Arguments) -> list[Layer]:
    """Return the MoE layers of a loaded model. Raises `ExpertPolicyError` if a layer does not support a policy."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import TopK

    config = resolved(model_runner.server_args)
    modules = dict(model_runner.model.named_modules())
    routers = {name: module for name, module in modules.items() if isinstance(module, TopK)}
    experts = {name: module for name, module in modules.items() if isinstance(module, FusedMoE)}
    numbers = {name: number_layer(name, module.layer_id) for name, module in (routers | experts).items()}
    on_cpu = model_runner.device == "cpu"
    runners = {} if on_cpu else {numbers[name]: _find_runner(name, experts[name], config) for name in experts}
    plans = _build_plans(arguments, [numbers[name] for name in routers])
    placement = read_placement(model_runner)
    paging = {numbers[name]: find_paging(module) for name, module in experts.items()}
    layers: list[Layer] = []
    current_frame = CurrentFrame()
    for name, module in routers.items():
        number, topk_config = numbers[name], module.topk_config
        try:
            output_format = "standard" if on_cpu else read_output_format(topk_config)
            if runners and number not in runners:
                raise ValueError("the layer has no FusedMoE that runs its experts; each router must have one")
            runner = runners.get(number, TRITON)  # the first DeepSeek model has no FusedMoE
            options = _read_options(runner, output_format, topk_config, config)
            recorded, pool = config.enable_return_routed_experts, paging.get(number)
            options |= {"recorded": recorded, "paging": pool, "current_frame": current_frame, "index": len(layers)}
            layer = Layer(number, topk_config, placement, **options)
            if recorded and layer.runner_ranks_logits:
                raise ValueError(
                    f"MoE runner {runner.name} ranks the logits itself, so --enable-return-routed-experts would "
                    "return nothing; use --moe-runner-backend triton"
                )
            check_router(name, modules)
            check_plans(layer, plans, config)
            layers.append(layer)
        except ValueError as error:
            raise refusal(name, "router", str(error)) from None
    # The first DeepSeek model has TopK modules, but it runs its experts without FusedMoE.
    hashed = count_hashed(modules)
    if not layers or len(layers) + hashed < len(experts):
        reason = f"{len(layers)} TopK modules for {len(experts)} MoE layers; each layer must have one"
        raise refusal("--model-path", model_runner.server_args.model_path, reason)
    if hashed and any(paging.values()):
        reason = f"{hashed} MoE layers route by a hash, so no policy limits their active experts to the page slots"
        raise refuse("enable_paged_experts", True, f"{reason}; must be off")
    for module, layer in zip(routers.values(), layers, strict=True):
        module.topk_config = layer.plain_config
    return layers


def read_placement(model_runner: Any) -> Placement | None:
    """Return the placement of the experts on the ranks. Return None if --ep-size is 1.

    Each rank holds a contiguous range of experts, unless SGLang maps expert ids (--init-expert-location,
    --enable-eplb). If an expert has several copies, the placement contains the rank of the first copy.
    """
    config = resolved(model_runner.server_args)
    if config.ep_size == 1:
        return None
    physical = expert_locations(config)
    if physical is None:
        model = model_config(model_runner.server_args)
        experts = torch.arange(find_value(model.hf_text_config, NUM_EXPERTS), device=model_runner.device)
        physical = experts.expand(model.num_hidden_layers, -1)
    return Placement(config.ep_size, (physical.shape[1] + config.ep_num_redundant_experts) // config.ep_size, physical)


def _find_runner(name: str, experts: Any, config: Any) -> Runner:
    """Return the MoE runner of a layer's experts. Raises `ExpertPolicyError` if the kernel is not supported."""
    try:
        runner = find_kernel(experts)
        if not routes_own_rows(config):  # with an all-to-all backend, the dispatcher drops empty slots
            check_kernel(runner, experts, config)
    except ValueError as error:
        raise refusal(name, "experts", str(error)) from None
    return runner


def _read_options(runner: Runner, output_format: str, topk_config: Any, config: Any) -> dict[str, Any]:
    """Return the keyword arguments of a `Layer`. Raises ValueError if the router's output format is wrong."""
    if routes_own_rows(config):  # the dispatcher reads expert ids and skips -1
        if output_format != "standard":
            raise ValueError(f"{output_format} output for an all-to-all dispatcher; must be standard")
        # SGLang also renumbers the expert ids if every rank has slots for shared experts.
        renumbers = config.ep_dispatch_algorithm is not None or num_shared_slots(topk_config) > 0
        return {"convention": DROPPED, "renumbers": renumbers}
    if output_format not in OUTPUTS[runner.convention]:
        allowed = " or ".join(OUTPUTS[runner.convention])
        raise ValueError(f"{output_format} output for MoE runner {runner.name}; must be {allowed}")
    # SGLang renumbers the ids if EPLB has moved experts. Before 0.5.23 SGLang also converts the ids to local ids of
    # each rank. On AMD, SGLang assigns padding rows to expert 0, even if no other row uses this expert.
    looked_up = runner.convention == FILLED and (routes_on("_is_hip") or (config.ep_size > 1 and not keeps_dropped()))
    return {
        "convention": runner.convention,
        "renumbers": config.ep_dispatch_algorithm is not None or looked_up,
        "runner_ranks_logits": output_format != "standard",
        "takes_kmax": runner.takes_kmax,
    }


def _build_plans(arguments: Arguments, layers: list[int]) -> list[SelectionPlan]:
    """Return the schedule's plans for these layers. Raises `ExpertPolicyError` if the schedule does not fit them."""
    if arguments.schedule is None or not layers:
        return [VANILLA]
    try:
        return arguments.schedule.plans(layers)
    except ValueError as error:
        raise ExpertPolicyError("--expert-policy", arguments.schedule.policy, str(error)) from None


def check_router(name: str, modules: Mapping[str, Any]) -> None:
    """Raise ValueError if a layer routes images with a second function, as DeepSeek-V4.1 does."""
    gate = modules.get(f"{name.rpartition('.')[0]}.gate")
    if getattr(gate, "e_score_correction_bias_vl", None) is not None:
        raise ValueError("DeepSeek-V4.1 routes images by another function; must be a model without images")


def check_plans(layer: Layer, plans: Sequence[SelectionPlan], config: Any) -> None:
    """Raise ValueError if a plan does not fit a layer.

    The layer's router, its MoE runner and the resolved arguments must support the plan.
    """
    for plan in plans:
        if layer.convention == MASKED:
            check_maskable(plan, layer.router)
        plan.check_router(layer.router)
        wider = plan.columns(layer.router) != layer.router.top_k
        if wider and not layer.takes_kmax:
            raise ValueError(f"kmax = {plan.kmax}: the layers' MoE runner uses top-k; must be {layer.router.top_k}")
        if wider and layer.num_shared and (config.ep_dispatch_algorithm is not None or routes_on("_use_aiter")):
            # SGLang derives the column of a shared expert from the number of columns. If `kmax` adds columns, SGLang
            # would treat the shared expert as a routed expert, or omit it.
            raise ValueError(
                f"kmax = {plan.kmax}: upstream would take the fused shared expert for a routed one; must be "
                f"{layer.router.top_k}, or use --disable-shared-experts-fusion"
            )


def count_hashed(modules: Mapping[str, Any]) -> int:
    """Return the number of MoE layers that route by a hash of the token, such as the first layers of DeepSeek-V4.

    No policy selects in such a layer.
    """
    from sglang.srt.layers.moe.hash_topk import HashTopK

    return sum(isinstance(module, HashTopK) for module in modules.values())
