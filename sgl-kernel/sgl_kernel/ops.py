"""The operators `torch.ops.sgl_kernel.*_attention_cpu` that SGLang's `intel_amx` attention backend calls.

Each has two overloads: the default one of SGLang 0.5.18 and later, with the scales of a quantized KV cache, and `unscaled` for
0.5.17, which passes none. What is not implemented is refused by name, never computed wrongly.
"""

import torch
from torch import Tensor

from sgl_kernel.attention import paged_attention

_TABLE = "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens"
_SCALES = "float k_scale, float v_scale"
_VARIANT = "float sm_scale, float logit_cap, bool is_cross, int sliding_window, Tensor? encoder_lens, Tensor? sinks"
_DECODE = (
    "(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, {}Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, "
    f"Tensor attn_logits, {_TABLE}, {_VARIANT}) -> ()"
)
_EXTEND = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor k_buffer, Tensor v_buffer, {}"
    f"{_TABLE}, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, {_VARIANT}, Tensor? tree_mask{{}}) -> ()"
)


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
    """Store this step's keys and values at slots `loc` [bs] (unless None: stored already), then attend with one query a request.

    query, output: [bs, heads, size]; key, value: [bs, KV heads, size] or flat; the rest as in `paged_attention`. `attn_logits` is
    scratch space of the compiled kernel, unused here.
    """
    _refuse(query, k_buffer, logit_cap, is_cross, sliding_window, sinks)
    if query.shape[0] != seq_lens.numel():
        raise ValueError(f"sgl_kernel on CPU: decode attention got {query.shape[0]} queries for {seq_lens.numel()} sequences")
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
    """Attend with each request's last `extend_seq_lens[i]` tokens; their keys and values are in the cache already.

    query, output: [tokens, heads, size]; `key` and `value` are what the caller has just stored, unused here; the rest as in
    `paged_attention`.
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
    """Raise NotImplementedError naming the first feature that this fallback does not compute."""
    unsupported = {
        "a logit cap": logit_cap > 0,
        "cross attention": is_cross,
        "a sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
        "a compressed KV cache (multi-head latent attention)": query.shape[-1] != k_buffer.shape[-1],
    }
    for feature, used in unsupported.items():
        if used:
            raise NotImplementedError(f"sgl_kernel on CPU: {feature} is not supported; install the compiled sgl-kernel for this model")


def _decode_unscaled(query: Tensor, k_buffer: Tensor, v_buffer: Tensor, *rest) -> None:
    decode_attention(query, k_buffer, v_buffer, 1.0, 1.0, *rest)


def _extend_unscaled(
    query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, k_buffer: Tensor, v_buffer: Tensor, *rest
) -> None:
    extend_attention(query, key, value, output, k_buffer, v_buffer, 1.0, 1.0, *rest, is_causal=True)


_library = torch.library.Library("sgl_kernel", "DEF")  # the operators live as long as this object
for _name, _schema, _kernel in (
    ("decode_attention_cpu", _DECODE.format(f"{_SCALES}, "), decode_attention),
    ("decode_attention_cpu.unscaled", _DECODE.format(""), _decode_unscaled),
    ("extend_attention_cpu", _EXTEND.format(f"{_SCALES}, ", ", bool is_causal"), extend_attention),
    ("extend_attention_cpu.unscaled", _EXTEND.format("", ""), _extend_unscaled),
):
    _library.define(_name + _schema)
    _library.impl(_name, _kernel, "CPU")
