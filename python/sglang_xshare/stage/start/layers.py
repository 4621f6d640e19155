"""The MoE layers of a loaded model, each with its router read, or the reason why one cannot be served."""

from __future__ import annotations

from typing import Any

from ...plan import SelectionPlan
from ...policies import VANILLA
from ..layer import Layer
from ..mask import check_maskable
from ..upstream import num_schedulers, number_layer, ranks_logits, resolved
from .arguments import Arguments
from .placement import read_placement
from .refusal import ExpertPolicyError, end_refused, refusal
from .routers import check_router, count_hashed
from .runners import check_runner


def find_layers(model_runner: Any, arguments: Arguments) -> list[tuple[Any, Layer]]:
    """(TopKConfig, Layer) of every MoE layer of this rank's model.

    Ends the process with one line for a router or a runner the stage cannot serve: what only a loaded model shows.
    """
    try:
        return read_layers(model_runner, arguments)
    except ExpertPolicyError as error:
        if num_schedulers(resolved(model_runner.server_args)) > 1:
            raise  # SGLang's controller of several schedulers would wait forever for one that just ended
        end_refused(error)


def read_layers(model_runner: Any, arguments: Arguments) -> list[tuple[Any, Layer]]:
    """(TopKConfig, Layer) of every MoE layer. Raises `ExpertPolicyError` for an unknown router and for a layer without
    one.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import TopK

    modules = dict(model_runner.model.named_modules())
    routers = {name: module for name, module in modules.items() if isinstance(module, TopK)}
    numbers = {name: number_layer(name, module.layer_id) for name, module in routers.items()}
    plans = _build_plans(arguments, list(numbers.values()), model_runner)
    placement = read_placement(model_runner)
    layers = []
    for name, module in routers.items():
        config = module.topk_config
        try:
            layer = Layer(numbers[name], config, placement)
            if arguments.align and layer.num_shared:
                raise ValueError(
                    "its runner takes shared experts' slots too, which --expert-policy-align does not sort; allowed is "
                    "--disable-shared-experts-fusion"
                )
            if ranks_logits(config):
                for plan in plans:
                    check_maskable(plan, layer.router)
            check_router(name, layer, plans, modules, resolved(model_runner.server_args))
            layers.append((config, layer))
        except ValueError as error:
            raise refusal(name, "router", str(error)) from None
    runners = {name: module for name, module in modules.items() if isinstance(module, FusedMoE)}
    for name, module in runners.items():
        try:
            check_runner(module, model_runner.device)
        except ValueError as error:
            raise refusal(name, "experts", str(error)) from None
    # DeepSeek's first model has a TopK, but runs its experts without FusedMoE.
    if not layers or len(layers) + count_hashed(modules) < len(runners):
        reason = f"{len(layers)} TopK modules for {len(runners)} MoE layers; allowed is one for each"
        raise refusal("--model-path", model_runner.server_args.model_path, reason)
    return layers


def _build_plans(arguments: Arguments, layers: list[int], model_runner: Any) -> list[SelectionPlan]:
    """The plans that these layers can get. Raises `ExpertPolicyError` where every one of them is always vanilla."""
    if arguments.schedule is None or not layers:
        return [VANILLA]
    is_whole = resolved(model_runner.server_args).pp_size == 1
    try:
        return arguments.schedule.plans(layers if is_whole else None)
    except ValueError as error:
        raise ExpertPolicyError(f"--expert-policy {arguments.schedule.policy}: {error}") from None
