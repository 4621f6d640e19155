"""What a CPU lacks of upstream's layers, lent to a server by its probe."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch


def lend_layers_with_states() -> None:
    """Let a CPU run gated delta nets, and Nemotron's mixers and gates.

    A gated norm by the kernel that upstream calls where there is AMX; upstream's own Triton convolution, which its
    mixer imports for every other device; and a product of matrices with a type for its result, which torch has for
    CUDA.
    """
    with suppress(ImportError):  # elsewhere before 0.5.23
        from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
        from sglang.srt.layers.attention.mamba import mamba

        fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True
        mamba.causal_conv1d_fn_triton, mamba.causal_conv1d_update_triton = causal_conv1d_fn, causal_conv1d_update
    multiply = torch.mm

    def multiply_as(
        a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> torch.Tensor:
        return multiply(a, b, **kwargs) if out_dtype is None else multiply(a.to(out_dtype), b.to(out_dtype), **kwargs)

    torch.mm = multiply_as


def lend_activations() -> None:
    """Let upstream's MoE runner for a CPU compute experts without a gate, by the squared ReLU, and gates clamped as
    gpt-oss's that lie before what they gate; it takes every clamped gate for one interleaved with that.
    """
    from sglang.srt.layers.moe import fused_moe_native

    run, silu = fused_moe_native.moe_forward_native, fused_moe_native.SiluAndMul
    interleaved = fused_moe_native.swiglu_gpt_oss_sigmoid_alpha

    def clamp(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        return interleaved(torch.stack(gate_up.chunk(2, -1), -1).flatten(-2), alpha, limit)

    def run_lent(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        if config.activation == "relu2":
            config = replace(config, activation="silu")
            fused_moe_native.SiluAndMul = lambda: lambda up: up.relu().square()
        elif not getattr(config, "gate_up_interleaved", True):
            fused_moe_native.swiglu_gpt_oss_sigmoid_alpha = clamp
        try:
            return run(layer, x, topk_output, config)
        finally:
            fused_moe_native.SiluAndMul = silu
            fused_moe_native.swiglu_gpt_oss_sigmoid_alpha = interleaved

    fused_moe_native.moe_forward_native = run_lent
