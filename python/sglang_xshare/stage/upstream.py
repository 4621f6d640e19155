"""Where SGLang releases differ in what the stage reads from them."""

from __future__ import annotations

from typing import Any


def resolved(server_args: Any) -> Any:
    """The resolved arguments: a view over the record from 0.5.20 on, the record itself before."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def model_config(server_args: Any) -> Any:
    """The `ModelConfig` that argument resolution has built and keeps."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def is_switched_on(name: str) -> bool:
    """Whether SGLang takes one of its own environment switches as set."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, name).get())


def num_shared_slots(topk_config: Any) -> int:
    """Columns of fused shared experts in a router's output."""
    slots = getattr(topk_config, "num_shared_topk_slots", None)
    return topk_config.num_fused_shared_experts if slots is None else slots


def ranks_logits(topk_config: Any) -> bool:
    """Whether a layer's runner takes router logits and ranks them itself (triton_kernels, as for gpt-oss on Hopper).

    Raises ValueError for a runner whose routing the stage cannot reach at all.
    """
    from sglang.srt.layers.moe import get_moe_runner_backend
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    output_format = topk_config.output_format
    if output_format is None:  # 0.5.17 decides at the first call
        return get_moe_runner_backend().is_triton_kernels()
    if output_format == TopKOutputFormat.BYPASSED:
        raise ValueError("routing inside the MoE kernel; allowed is a runner with standard or triton_kernels output")
    return output_format == TopKOutputFormat.TRITON_KERNEL


def scales_unnormalized_groups() -> bool:
    """Whether a grouped router that does not renormalize applies a scaling factor on its output (from 0.5.22 on)."""
    from sglang.srt.layers.moe import topk

    return hasattr(topk, "is_routed_scaling_factor_fused_in_topk")
