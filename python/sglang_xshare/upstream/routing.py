"""SGLang's routers and MoE runners. Their code differs between releases."""

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
    """Return the layer number of a router.

    This is `layer_id`, or the number in the module's `name` if `layer_id` is None. A name is, for example,
    `model.layers.3.mlp.topk`. Before 0.5.22, Mixtral, OLMoE, Granite-MoE and MiniMax-M2 set no id.
    """
    return int(re.findall(r"(?<=\.)\d+(?=\.)", name)[-1]) if layer_id is None else layer_id


@cache
def _extend(config_type: type) -> type:
    """Return a subclass of SGLang's `TopKConfig` whose instances have an attribute `layer`."""
    return type(f"{config_type.__name__}OfLayer", (config_type,), {"layer": None})


def carry(topk_config: Any, layer: Any) -> Any:
    """Return a copy of a `TopKConfig` that also carries its layer. `hooks.route` reads the layer."""
    carrying, config_type = copy(topk_config), topk_config.__class__
    carrying.__class__ = _extend(config_type)
    carrying.layer = layer
    return carrying


def num_shared_slots(topk_config: Any) -> int:
    """Return how many columns of a router's output are for fused shared experts."""
    slots = getattr(topk_config, "num_shared_topk_slots", None)
    return topk_config.num_fused_shared_experts if slots is None else slots


def read_output_format(topk_config: Any) -> str:
    """Return the name of the output format that a layer's router uses.

    The names are "standard" (ids and weights), "triton_kernel" (the routing of triton_kernels) and "bypassed" (logits,
    which the runner ranks).
    """
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    output_format = topk_config.output_format
    if output_format is not None:
        return str(TopKOutputFormat(output_format).name.lower())
    backend = get_moe_runner_backend()  # before 0.5.22, the router sets the format in its first call
    if backend.is_triton_kernels():
        return "triton_kernel"
    return "bypassed" if backend.is_flashinfer_trtllm() or backend.is_flashinfer_mxfp4() else "standard"


def hands_parts() -> bool:
    """Return whether a router may get the summands of its logits instead of their sum.

    This happens on AMD from 0.5.23 on. The router first looks up the layer's own routing function. Then it adds up the
    summands and calls this function.
    """
    import torch

    if torch.version.hip is None:
        return False
    from sglang.srt.layers.moe.topk import TopK

    return "router_logits_partials" in inspect.signature(TopK.forward_cuda).parameters


def keeps_dropped() -> bool:
    """Return whether an id of -1 stays -1 when expert parallelism renumbers experts. It does from 0.5.23 on."""
    from sglang.srt.layers.moe.token_dispatcher import standard

    return hasattr(standard, "_map_topk_ids_to_local_experts")


def gathers_routed() -> bool:
    """Return whether each data-parallel attention rank routes its own rows before the ranks gather all rows."""
    from sglang.srt.layers.moe.utils import should_use_flashinfer_cutlass_moe_fp4_allgather

    return bool(should_use_flashinfer_cutlass_moe_fp4_allgather())


def leaves_sums(layer: Any, config: Any) -> bool:
    """Return whether a `FusedMoE` may leave a row's sum over experts to the next collective.

    SGLang decides this when it builds the model. The collective must be CuTe DSL's collective, or Qwen4's collective in
    bf16. DeepSeek's layers decide again in each step.
    """
    if not getattr(layer, "supports_deferred_finalize", False):
        return False
    cutedsl = getattr(config, "flashinfer_allreduce_fusion_backend", None) == "cutedsl"
    return cutedsl or type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def keep_sums(model: Any, layers: Collection[int]) -> None:
    """Make each `FusedMoE` of these layers add up a row's experts itself.

    A layer that receives expert ids cannot leave this sum to a collective.
    """
    if not layers:
        return
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    for name, module in model.named_modules():
        if isinstance(module, FusedMoE) and number_layer(name, module.layer_id) in layers:
            module.supports_deferred_finalize = False


def find_runner(layer: Any) -> str | None:
    """Return the name of a `FusedMoE`'s runner, or None if its kernel has no runner.

    The name is a value of --moe-runner-backend. From 0.5.23 on, the quantization method returns the runner. Before, the
    runner is an attribute of the method, its scheme, or the scheme's kernel. AMD's aiter comes first.
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
    """Return whether a grouped router scales weights that it does not renormalize. It does from 0.5.22 on."""
    from sglang.srt.layers.moe import topk

    return hasattr(topk, "is_routed_scaling_factor_fused_in_topk")


def folds_scaling(topk_config: Any) -> bool:
    """Return whether the router scales weights in place of the model.

    AMD's aiter does so for some routers, whatever the router's config says.
    """
    if not routes_on("_use_aiter"):
        return False
    if topk_config.use_grouped_topk:
        return topk_config.correction_bias is not None
    return topk_config.scoring_func == "sqrtsoftplus" and topk_config.custom_routing_function is None


def routes_on(flag: str) -> bool:
    """Return a platform flag of SGLang's router module: `_is_cpu`, `_is_cuda`, `_is_hip` or `_use_aiter`."""
    from sglang.srt.layers.moe import topk

    return bool(getattr(topk, flag))


def record_routed(topk_config: Any, layer_id: int, ids: torch.Tensor) -> None:
    """Record the expert ids [rows, columns] of a layer for --enable-return-routed-experts."""
    from sglang.srt.layers.moe.topk import capture_routed_experts_if_allowed

    capture_routed_experts_if_allowed(topk_config, layer_id, ids)


def expert_locations(config: Any) -> torch.Tensor | None:
    """Return the physical number of each logical expert as [layers, N], or None if both numbers agree.

    EPLB updates the tensor in place.
    """
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
    """Return whether a grouped router with a bias always renormalizes. FlashInfer's CUDA kernel does before 0.5.22."""
    return routes_on("_is_cuda") and not scales_unnormalized_groups()
