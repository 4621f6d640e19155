"""The operators `torch.ops.sgl_kernel.*` of SGLang's `intel_amx` attention backend, of Qwen3-Next and of Qwen3.5.

The attention operators have two overloads. SGLang 0.5.21 and 0.5.23 pass the scales of a quantized KV cache. SGLang
0.5.17 does not pass scales (`unscaled`). An operator refuses a feature that it does not implement, and the error names
the feature.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sgl_kernel import gated_attention, mamba
from sgl_kernel.attention import paged_attention

_DECODE = """(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, {scales}
    Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits,
    Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,
    float sm_scale, float logit_cap, bool is_cross, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"""
_EXTEND = """(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor k_buffer, Tensor v_buffer, {scales}
    Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,
    Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend,
    float sm_scale, float logit_cap, bool is_cross, int sliding_window, Tensor? encoder_lens, Tensor? sinks,
    Tensor? tree_mask{causal}) -> ()"""
_HEADS = "int num_heads_qk, int num_heads_v, int head_qk, int head_v"
_NORMS = "Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim"
_DELTA_RULE = """(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b,
    Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel,
    float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"""


def decode_attention(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store the keys and values of this step at the slots `loc`, then compute attention for one query of each request.

    * `query` and `output` are [bs, heads, size].
    * `key` and `value` [bs, KV heads * size] are None if they are already stored. `loc` is [bs].
    * `attn_logits` is scratch memory of the compiled kernel and is unused.
    * All other arguments are as in `paged_attention`.

    Raises NotImplementedError for a feature that `_refuse` names, and ValueError if a request does not have exactly one
    query.
    """
    _refuse(query, k_buffer, logit_cap, is_cross, sliding_window, sinks)
    if query.shape[0] != seq_lens.numel():
        raise ValueError(
            f"sgl_kernel on CPU: {query.shape[0]} queries; must be {seq_lens.numel()}, one for each request"
        )
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    batch = seq_lens.numel()
    paged_attention(
        query,
        k_buffer,
        v_buffer,
        output,
        req_to_token,
        req_pool_indices,
        seq_lens,
        query_lens=torch.ones(batch, dtype=torch.int64),
        query_start=torch.arange(batch),
        scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def extend_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Compute attention for the last `extend_seq_lens[i]` tokens of each request.

    * `query` and `output` are [tokens, heads, size]. `extend_start_loc` [bs] is the first row of a request.
    * `key` and `value` are unused, because they are already in the cache. `max_len_extend` is unused.
    * All other arguments are as in `paged_attention`.

    Raises NotImplementedError for a feature that `_refuse` names, and ValueError as `paged_attention` does.
    """
    _refuse(query, k_buffer, logit_cap, is_cross, sliding_window, sinks)
    paged_attention(
        query,
        k_buffer,
        v_buffer,
        output,
        req_to_token,
        req_pool_indices,
        seq_lens,
        query_lens=extend_seq_lens,
        query_start=extend_start_loc,
        scale=sm_scale,
        causal=is_causal,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _refuse(
    query: Tensor, k_buffer: Tensor, logit_cap: float, is_cross: bool, sliding_window: int, sinks: Tensor | None
) -> None:
    """Raise NotImplementedError for a feature that this module does not compute. The error names the feature."""
    unsupported = {
        "a logit cap": logit_cap > 0,
        "cross attention": is_cross,
        "a sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
        "a compressed KV cache (multi-head latent attention)": query.shape[-1] != k_buffer.shape[-1],
    }
    for feature, in_use in unsupported.items():
        if in_use:
            raise NotImplementedError(f"sgl_kernel on CPU: {feature} is not supported; use the compiled sgl-kernel")


def _unscaled(kernel: Callable[..., None], scales_at: int, *unpassed: bool) -> Callable[..., None]:
    """Return the kernel with the signature of SGLang 0.5.17, which passes fewer arguments.

    The scales are 1. The `unpassed` arguments are added at the end.
    """
    return lambda *args: kernel(*args[:scales_at], 1.0, 1.0, *args[scales_at:], *unpassed)


_SCALES = "float k_scale, float v_scale,"
_library = torch.library.Library("sgl_kernel", "DEF")  # the operators exist as long as this object
for _name, _schema, _kernel in (
    ("decode_attention_cpu", _DECODE.format(scales=_SCALES), decode_attention),
    ("decode_attention_cpu.unscaled", _DECODE.format(scales=""), _unscaled(decode_attention, 3)),
    ("extend_attention_cpu", _EXTEND.format(scales=_SCALES, causal=", bool is_causal"), extend_attention),
    ("extend_attention_cpu.unscaled", _EXTEND.format(scales="", causal=""), _unscaled(extend_attention, 6, True)),
    ("fused_sigmoid_gating_delta_rule_update_cpu", _DELTA_RULE, mamba.update_gated_delta_rule),
    (
        "fused_gdn_gating_cpu",
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        mamba.gate_delta_rule,
    ),
    (
        "fused_rmsnorm_gated_cpu",
        "(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor",
        gated_attention.norm_outputs,
    ),
    ("fused_sigmoid_mul_cpu", "(Tensor(a!) x, Tensor gate) -> ()", gated_attention.gate_in_place),
    (
        "fused_qk_gemma_rmsnorm_cpu",
        f"(Tensor q, {_NORMS}) -> (Tensor, Tensor)",
        gated_attention.norm_queries_and_keys,
    ),
    (
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        f"(Tensor q_gate, {_NORMS}, int num_head) -> (Tensor, Tensor, Tensor)",
        gated_attention.norm_queries_and_keys_with_gate,
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        f"(Tensor mixed_qkvz, Tensor mixed_ba, {_HEADS}) -> (Tensor, Tensor, Tensor, Tensor)",
        gated_attention.cut_projections,
    ),
):
    _library.define(_name + _schema)
    _library.impl(_name, _kernel, "CPU")
