"""What a CPU lacks of upstream's layers, lent to a server by its probe."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional


def lend_layers_with_states() -> None:
    """Let a CPU run gated delta nets, and Nemotron's mixers and gates.

    A gated norm by the kernel that upstream calls where there is AMX; to Nemotron's mixer, which has a convolution for
    every other device, that of gated delta nets, and a step of its states, whose Triton kernel is not interpreted; what
    torch has for CUDA, a product of matrices with a type for its result and a device to be on.
    """
    take_first_configurations()
    with suppress(ImportError):  # elsewhere before 0.5.23
        from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
        from sglang.srt.layers.attention.mamba import mamba

        from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu

        fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True
        mamba.causal_conv1d_fn_triton = causal_conv1d_fn_cpu
        mamba.causal_conv1d_update_triton = causal_conv1d_update_cpu
        mamba.selective_state_update = step_states
    multiply = torch.mm

    def multiply_as(a, b, *, out_dtype=None, **kwargs):
        return multiply(a, b, **kwargs) if out_dtype is None else multiply(a.to(out_dtype), b.to(out_dtype), **kwargs)

    setattr(torch.cpu, "device", nullcontext)  # noqa: B010 - mypy knows what torch has
    setattr(torch, "mm", multiply_as)  # noqa: B010 - mypy knows another signature


def take_first_configurations() -> None:
    """Triton can time none of a kernel's where it interprets it."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]


def step_states(states, x, dt, decay, b, c, skip, *, dt_bias, state_batch_indices, out, **unused):
    """One token of every request by Mamba 2: x, dt, out [bs, heads, size]; b, c [bs, groups, state size]."""
    slots, step = state_batch_indices.long(), functional.softplus(dt + dt_bias)
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1).unsqueeze(2) for part in (b, c))
    states[slots] = states[slots] * (step.unsqueeze(-1) * decay).exp() + (step * x).unsqueeze(-1) * b
    out.copy_((states[slots] * c).sum(-1) + skip * x)


def lend_squared_relu() -> None:
    """Let upstream's MoE runner for a CPU compute experts without a gate, by the squared ReLU and with their factor."""
    from sglang.srt.layers.moe import fused_moe_native

    run, silu = fused_moe_native.moe_forward_native, fused_moe_native.SiluAndMul

    def run_lent(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        if config.activation != "relu2":
            return run(layer, x, topk_output, config)
        factor = 1.0 if layer.should_fuse_routed_scaling_factor_in_topk else config.routed_scaling_factor
        fused_moe_native.SiluAndMul = lambda: lambda up: up.relu().square()
        try:
            return run(layer, x, topk_output, replace(config, activation="silu")) * factor
        finally:
            fused_moe_native.SiluAndMul = silu

    fused_moe_native.moe_forward_native = run_lent
