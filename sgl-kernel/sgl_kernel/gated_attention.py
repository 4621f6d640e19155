"""Norms, gates and split projections around the attention of Qwen3-Next and Qwen3.5."""

from torch import Tensor
from torch.nn import functional


def gate_in_place(x: Tensor, gate: Tensor) -> None:
    """Multiply `x` by the sigmoid of the gate, which may have a dimension for heads."""
    x.mul_(gate.float().sigmoid().reshape(x.shape).to(x.dtype))


def norm_queries_and_keys(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [tokens, heads * size] as [tokens * heads, size], normalized, times 1 + weight.

    Each head is scaled to unit mean square.
    """
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _norm(q, 1 + q_weight.float(), eps).to(q.dtype), _norm(k, 1 + k_weight.float(), eps).to(k.dtype)


def norm_queries_and_keys_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (queries, keys, gates), normalized as in `norm_queries_and_keys`, if each query head precedes its gate."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, -1)
    return *norm_queries_and_keys(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def cut_projections(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (queries, keys and values in one, z [tokens, value heads, size], b and a [tokens, value heads])."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return mixed_qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def norm_outputs(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return rows [size] of unit mean square, times the weight and SiLU of the gate."""
    return (_norm(x, weight.float(), eps) * functional.silu(gate.float())).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
