"""Linear attention of Qwen3-Next and Qwen3.5: a short causal convolution, then the gated delta rule.

SGLang imports `sgl_kernel.mamba` for models with such layers. Every request has a slot in two tables of states. A
padding row has slot -1. The convolution and the delta rule update the tables in place. A slot then contains the state
after the request's last token.
"""

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    conv_states: Tensor,
    activation: str | None = "silu",
    seq_lens_cpu: list[int] | None = None,
) -> Tensor:
    """Convolve the new tokens of all requests. The result has the shape of `x`.

    The new tokens of a request follow the inputs that its state contains.

    * `x` [channels, tokens] are the new tokens, and `weight` is [channels, width].
    * `query_start_loc` [bs + 1] is the first token of each request.
    * `conv_states` [slots, channels, width - 1] contains earlier inputs. `cache_indices` [bs] is the slot of each
      request.
    * `has_initial_state` [bs] is False for a request without earlier inputs.
    * `seq_lens_cpu` has the same information as `query_start_loc` and is unused.
    """
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        if slot < 0:
            continue
        tokens = slice(starts[number], starts[number + 1])
        state = conv_states[slot]
        if has_initial_state is not None and not has_initial_state[number]:
            state = torch.zeros_like(state)
        out[:, tokens] = _convolve(x[None, :, tokens], state[None], weight, bias, activation, conv_states, [slot])[0]
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **drafts: Tensor | None,
) -> Tensor:
    """Convolve one new token of each request, `x` [bs, channels], as `causal_conv1d_fn_cpu` does.

    Raises NotImplementedError for draft tokens, because their states would need slots of their own.
    """
    if x.dim() != 2 or any(value is not None for value in drafts.values()):
        raise NotImplementedError("sgl_kernel on CPU: no draft tokens in linear attention; use the compiled sgl-kernel")
    slots = conv_state_indices.long()
    real = slots >= 0
    out = torch.zeros_like(x)
    out[real] = _convolve(
        x[real].unsqueeze(-1), conv_state[slots[real]], weight, bias, activation, conv_state, slots[real]
    ).squeeze(-1)
    return out


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, None, None]:
    """Apply the delta rule to the new tokens of each request, starting from the state of the request.

    Returns the outputs [1, tokens, value heads, size]. The two other results are None, in place of states that SGLang
    expects.

    * `q` and `k` are [1, tokens, heads, key size], and `v` is [1, tokens, value heads, size].
    * `g` [1, tokens, value heads] is the logarithm of the decay. `beta` [1, tokens, value heads] is the rate.
    * `cu_seqlens` [bs + 1] is the first token of each request. `initial_state` is [slots, value heads, size, key size].
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError(
            "sgl_kernel on CPU: tokens must come before heads, and queries and keys must be normalized"
        )
    out = _delta_rule(q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices, cu_seqlens)
    return out[None].to(v.dtype), None, None


def update_gated_delta_rule(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Compute the gates from their inputs, and apply the delta rule as SGLang does in decode steps.

    `a` and `b` [tokens, value heads] are the inputs of the gates.
    """
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError("sgl_kernel on CPU: softplus must have beta 1 and threshold 20")
    g, beta = gate_delta_rule(A_log, a, b, dt_bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out


def gate_delta_rule(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and the rate. Both are [1, tokens, value heads]."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None].to(b.dtype)


def _convolve(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    table: Tensor,
    slots: Tensor | list[int],
) -> Tensor:
    """Convolve the states followed by `x`, and write the new states to the table.

    `states` is [bs, channels, width - 1], and `x` is [bs, channels, tokens].
    """
    seen = torch.cat((states.to(x.dtype), x), -1)
    table[slots] = seen[..., -states.shape[-1] :].to(table.dtype)
    windows = seen.unfold(-1, weight.shape[-1], 1)  # [bs, channels, tokens, width]
    out = (windows.float() * weight.float()[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.float()[:, None]
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"sgl_kernel on CPU: {activation!r} after a convolution; must be silu")
    if activation is not None:
        out = functional.silu(out)
    return out.to(x.dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
) -> Tensor:
    """Return the outputs in float32. Each round of the loop computes one token of every request."""
    heads_each = value.shape[1] // query.shape[1]
    query, key = (_normalize(x.float()).repeat_interleave(heads_each, 1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    value, rate = value.float(), rate.float()
    out = torch.zeros_like(value)
    lengths = starts.diff()
    for step in range(int(lengths.max()) if len(lengths) else 0):
        here = (lengths > step) & (slots >= 0)
        rows, places = starts[:-1][here].long() + step, slots[here].long()
        state = table[places].float() * decay[rows].float().exp()[..., None, None]
        known = (state * key[rows].unsqueeze(-2)).sum(-1)
        change = (value[rows] - known) * rate[rows].unsqueeze(-1)
        state = state + change.unsqueeze(-1) * key[rows].unsqueeze(-2)
        table[places] = state.to(table.dtype)
        out[rows] = (state * query[rows].unsqueeze(-2)).sum(-1)
    return out


def _normalize(x: Tensor) -> Tensor:
    """Return each vector divided by its length."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
