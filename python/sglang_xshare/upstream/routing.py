"""SGLang's routers and MoE runners, whose code differs by release."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from .server import spell

if TYPE_CHECKING:
    import torch


def number_layer(name: str, layer_id: int | None) -> int:
    """Return the layer number of a router: `layer_id`, or, if this is None, the number in its module's `name`.

    A name is, for example, `model.layers.3.mlp.topk`. Before 0.5.22 Mixtral, OLMoE, Granite-MoE and MiniMax-M2 set no
    id.
    """
    return int(re.findall(r"(?<=\.)\d+(?=\.)", name)[-1]) if layer_id is None else layer_id


@cache
def _extend(config_type: type) -> type:
    """Return a subclass of upstream's `TopKConfig` whose instances carry their layer."""
    return type(f"{config_type.__name__}OfLayer", (config_type,), {"layer": None})


def carry(topk_config: Any, layer: Any) -> Any:
    """Return a copy of a `TopKConfig` that carries a layer, which `hooks.route` reads."""
    carrying, config_type = copy(topk_config), topk_config.__class__
    carrying.__class__ = _extend(config_type)
    carrying.layer = layer
    return carrying


def num_shared_slots(topk_config: Any) -> int:
    """Return the number of columns of a router's output that are for fused shared experts."""
    slots = getattr(topk_config, "num_shared_topk_slots", None)
    return topk_config.num_fused_shared_experts if slots is None else slots


def read_output_format(topk_config: Any) -> str:
    """Return the name of the output format that a layer's router returns for its runner.

    The names are "standard" (ids and weights), "triton_kernel" (the routing of triton_kernels) and "bypassed" (logits,
    for the runner to rank).
    """
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    output_format = topk_config.output_format
    if output_format is not None:
        return str(TopKOutputFormat(output_format).name.lower())
    backend = get_moe_runner_backend()  # before 0.5.22 the first call sets the format
    if backend.is_triton_kernels():
        return "triton_kernel"
    return "bypassed" if backend.is_flashinfer_trtllm() or backend.is_flashinfer_mxfp4() else "standard"


def hands_parts() -> bool:
    """Return whether a router may get the summands of its logits in place of their sum (from 0.5.23 on, on AMD).

    The router adds up the summands before it calls a layer's own routing function, but after it has looked it up.
    """
    import torch

    if torch.version.hip is None:
        return False
    from sglang.srt.layers.moe.topk import TopK

    return "router_logits_partials" in inspect.signature(TopK.forward_cuda).parameters


def keeps_dropped() -> bool:
    """Return whether an id of -1 stays -1 when expert parallelism renumbers a rank's experts (from 0.5.23 on)."""
    from sglang.srt.layers.moe.token_dispatcher import standard

    return hasattr(standard, "_map_topk_ids_to_local_experts")


def gathers_routed() -> bool:
    """Return whether data-parallel attention ranks each route their own rows, and then collect the rows of all."""
    from sglang.srt.layers.moe.utils import should_use_flashinfer_cutlass_moe_fp4_allgather

    return bool(should_use_flashinfer_cutlass_moe_fp4_allgather())


def leaves_sums(layer: Any, config: Any) -> bool:
    """Return whether a `FusedMoE` may leave a row's sum over experts to the next collective.

    SGLang decides when it builds the model, for CuTe DSL's collective and for Qwen4's collective in bf16. DeepSeek's
    layers decide again in each step.
    """
    if not getattr(layer, "supports_deferred_finalize", False):
        return False
    cutedsl = getattr(config, "flashinfer_allreduce_fusion_backend", None) == "cutedsl"
    return cutedsl or type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def keep_sums(model: Any, layers: Collection[int]) -> None:
    """Let each `FusedMoE` of these layers add up a row's experts itself: a layer that gets ids cannot defer the sum."""
    if not layers:
        return
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    for name, module in model.named_modules():
        if isinstance(module, FusedMoE) and number_layer(name, module.layer_id) in layers:
            module.supports_deferred_finalize = False


def find_runner(layer: Any) -> str | None:
    """Return the runner of a `FusedMoE`, as --moe-runner-backend spells it; None for a kernel without a runner.

    From 0.5.23 on the method returns the runner. Before, the runner is an attribute of the method, its scheme or the
    scheme's kernel, and AMD's aiter comes first.
    """
    method: Any = getattr(layer, "quant_method", None)
    if hasattr(method, "get_moe_runner_backend"):
        backend = method.get_moe_runner_backend(layer)
        return None if backend is None else spell(backend)
    owners = [method, getattr(layer, "scheme", None)]
    owners += [getattr(owner, "kernel", None) for owner in owners]
    runners = [getattr(owner, name, None) for name in ("_aiter_runner", "runner") for owner in owners]
    return next((spell(runner.runner_backend) for runner in runners if runner is not None), None)


def scales_unnormalized_groups() -> bool:
    """Return whether a grouped router that does not renormalize scales its output (from 0.5.22 on)."""
    from sglang.srt.layers.moe import topk

    return hasattr(topk, "is_routed_scaling_factor_fused_in_topk")


def folds_scaling(topk_config: Any) -> bool:
    """Return whether the router scales its weights in place of the model, whatever its config says, as AMD's aiter."""
    if not routes_on("_use_aiter"):
        return False
    if topk_config.use_grouped_topk:
        return topk_config.correction_bias is not None
    return topk_config.scoring_func == "sqrtsoftplus" and topk_config.custom_routing_function is None


def routes_on(flag: str) -> bool:
    """Return a platform flag of upstream's router module: `_is_cpu`, `_is_cuda`, `_is_hip` or `_use_aiter`."""
    from sglang.srt.layers.moe import topk

    return bool(getattr(topk, flag))


def record_routed(topk_config: Any, layer_id: int, ids: torch.Tensor) -> None:
    """Let --enable-return-routed-experts return these expert ids [rows, columns] for a layer of this forward."""
    from sglang.srt.layers.moe.topk import capture_routed_experts_if_allowed

    capture_routed_experts_if_allowed(topk_config, layer_id, ids)


def expert_locations(config: Any) -> torch.Tensor | None:
    """Return [layers, N], each logical expert's physical number, which EPLB updates in place; None if both agree."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if config.ep_dispatch_algorithm is None or metadata is None:
        return None
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        return metadata.logical_to_rank_dispatch_physical_map
    return metadata.logical_to_all_physical_map[:, :, 0]


def list_routers(model: Any) -> list[Any]:
    """Return the `TopK` modules of a model."""
    from sglang.srt.layers.moe.topk import TopK

    return [module for module in model.modules() if isinstance(module, TopK)]


def renormalizes_biased_groups() -> bool:
    """Return whether a grouped router with a bias always renormalizes: before 0.5.22, in FlashInfer's CUDA kernel."""
    return routes_on("_is_cuda") and not scales_unnormalized_groups()
