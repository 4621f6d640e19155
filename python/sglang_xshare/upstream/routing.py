"""What the stage reads of SGLang's routers and MoE runners, whose code differs by release."""

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
    """The layer number of a router, the module `name` of a model: the one its model has told it, or else the one in its
    name, as in `model.layers.3.mlp.topk`. Before 0.5.22 Mixtral, OLMoE, Granite-MoE and MiniMax-M2 tell it none.
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
    """How many columns of a router's output are for fused shared experts."""
    slots = getattr(topk_config, "num_shared_topk_slots", None)
    return topk_config.num_fused_shared_experts if slots is None else slots


def read_output_format(topk_config: Any) -> str:
    """What a layer's router hands its runner, as SGLang names it: "standard" (ids and weights), "triton_kernel" (what
    triton_kernels made of logits) or "bypassed" (logits, for the runner to rank).
    """
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    output_format = topk_config.output_format
    if output_format is not None:
        return str(TopKOutputFormat(output_format).name.lower())
    backend = get_moe_runner_backend()  # before 0.5.22 the first call decides
    if backend.is_triton_kernels():
        return "triton_kernel"
    return "bypassed" if backend.is_flashinfer_trtllm() or backend.is_flashinfer_mxfp4() else "standard"


def hands_parts() -> bool:
    """Whether a router may be handed the parts that its logits are the sum of (from 0.5.23 on, on AMD). It adds them up
    before it calls a layer's own routing function, but not before it asks which function that is.
    """
    import torch

    if torch.version.hip is None:
        return False
    from sglang.srt.layers.moe.topk import TopK

    return "router_logits_partials" in inspect.signature(TopK.forward_cuda).parameters


def keeps_dropped() -> bool:
    """Whether an id of -1 stays one where expert parallelism numbers a rank's own experts (from 0.5.23 on)."""
    from sglang.srt.layers.moe.token_dispatcher import standard

    return hasattr(standard, "_map_topk_ids_to_local_experts")


def gathers_routed() -> bool:
    """Whether ranks of data-parallel attention each route their own rows, and then gather them."""
    from sglang.srt.layers.moe.utils import should_use_flashinfer_cutlass_moe_fp4_allgather

    return bool(should_use_flashinfer_cutlass_moe_fp4_allgather())


def leaves_sums(layer: Any, config: Any) -> bool:
    """Whether a `FusedMoE` may be told to leave its rows' sums over experts to the next collective, by what was settled
    when the model was built: CuTe DSL's, or that of Qwen4 in bf16. DeepSeek asks again in each step.
    """
    if not getattr(layer, "supports_deferred_finalize", False):
        return False
    cutedsl = getattr(config, "flashinfer_allreduce_fusion_backend", None) == "cutedsl"
    return cutedsl or type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def keep_sums(model: Any, layers: Collection[int]) -> None:
    """Have each `FusedMoE` of these layers sum up a row's experts: handed ids, it must not leave that to others."""
    if not layers:
        return
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    for name, module in model.named_modules():
        if isinstance(module, FusedMoE) and number_layer(name, module.layer_id) in layers:
            module.supports_deferred_finalize = False


def find_runner(layer: Any) -> str | None:
    """What a `FusedMoE` runs its experts with, spelt as --moe-runner-backend; None for a kernel without a runner. From
    0.5.23 on its method says so; before it is the method's, its scheme's or the scheme's kernel's, AMD's aiter first.
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
    """Whether a grouped router that does not renormalize applies a scaling factor on its output (from 0.5.22 on)."""
    from sglang.srt.layers.moe import topk

    return hasattr(topk, "is_routed_scaling_factor_fused_in_topk")


def folds_scaling(topk_config: Any) -> bool:
    """Whether a router scales its weights whatever its config says, as AMD's aiter does: its model then never does."""
    if not routes_on("_use_aiter"):
        return False
    if topk_config.use_grouped_topk:
        return topk_config.correction_bias is not None
    return topk_config.scoring_func == "sqrtsoftplus" and topk_config.custom_routing_function is None


def routes_on(flag: str) -> bool:
    """What upstream's routers have found of their machine: `_is_cpu`, `_is_cuda`, `_is_hip`, `_use_aiter`."""
    from sglang.srt.layers.moe import topk

    return bool(getattr(topk, flag))


def record_routed(topk_config: Any, layer_id: int, ids: torch.Tensor) -> None:
    """Have --enable-return-routed-experts return these expert ids [rows, columns] for a layer of this forward."""
    from sglang.srt.layers.moe.topk import capture_routed_experts_if_allowed

    capture_routed_experts_if_allowed(topk_config, layer_id, ids)


def expert_locations(config: Any) -> torch.Tensor | None:
    """[layers, N] physical number of each logical expert, which EPLB updates in place; None if they are the same."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if config.ep_dispatch_algorithm is None or metadata is None:
        return None
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        return metadata.logical_to_rank_dispatch_physical_map
    return metadata.logical_to_all_physical_map[:, :, 0]


def list_routers(model: Any) -> list[Any]:
    """The `TopK` modules of a model."""
    from sglang.srt.layers.moe.topk import TopK

    return [module for module in model.modules() if isinstance(module, TopK)]


def renormalizes_biased_groups() -> bool:
    """Whether a grouped router with a bias renormalizes anyway: on CUDA before 0.5.22, by FlashInfer's kernel."""
    return routes_on("_is_cuda") and not scales_unnormalized_groups()
