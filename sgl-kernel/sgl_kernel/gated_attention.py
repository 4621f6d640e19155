"""The norms, gates and split projections that Qwen3-Next and Qwen3.5 use before and after attention."""

from torch import Tensor
from torch.nn import functional


def gate_in_place(x: Tensor, gate: Tensor) -> None:
    """Multiply `x` by the sigmoid of the gate. The gate may have a separate dimension for heads."""
    x.mul_(gate.float().sigmoid().reshape(x.shape).to(x.dtype))


def norm_queries_and_keys(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys with normalized heads, multiplied by 1 + weight.

    The arguments are [tokens, heads * size], and the results are [tokens * heads, size]. A normalized head has a mean
    square of 1.
    """
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _norm(q, 1 + q_weight.float(), eps).to(q.dtype), _norm(k, 1 + k_weight.float(), eps).to(k.dtype)


def norm_queries_and_keys_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (queries, keys, gates). Each query head in `q_gate` is followed by its gate.

    Queries and keys are normalized as in `norm_queries_and_keys`.
    """
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, -1)
    return *norm_queries_and_keys(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def cut_projections(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors: queries, keys and values together, then z, b and a.

    z is [tokens, value heads, size]. b and a are [tokens, value heads].
    """
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return mixed_qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def norm_outputs(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return rows [size] with a mean square of 1, multiplied by the weight and by SiLU of the gate."""
    return (_norm(x, weight.float(), eps) * functional.silu(gate.float())).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
