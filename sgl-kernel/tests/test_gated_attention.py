"""Tests that compare the operators around the attention of Qwen3.5 with computations on single heads."""

import torch
from torch.testing import assert_close

import sgl_kernel  # noqa: F401  registers the operators

operators = torch.ops.sgl_kernel
TOKENS, HEADS, KV_HEADS, SIZE, EPS = 3, 4, 2, 8, 1e-6


def test_every_head_has_unit_mean_square_times_its_weight() -> None:
    q_gate, k = torch.randn(TOKENS, HEADS * 2 * SIZE), torch.randn(TOKENS, KV_HEADS * SIZE)
    q_weight, k_weight = torch.randn(SIZE), torch.randn(SIZE)
    heads = q_gate.view(TOKENS, HEADS, 2 * SIZE)
    q, gate = heads[..., :SIZE].reshape(TOKENS, -1), heads[..., SIZE:].reshape(-1, SIZE)
    got = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, EPS, SIZE, HEADS)
    assert torch.equal(got[2], gate)
    plain = operators.fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, EPS, SIZE)
    assert all(torch.equal(*pair) for pair in zip(got[:2], plain, strict=True))
    for x, weight, normed in ((q, q_weight, plain[0]), (k, k_weight, plain[1])):
        for row, head in zip(normed, x.view(-1, SIZE), strict=True):
            assert_close(row, head / head.square().mean().sqrt() * (1 + weight))


def test_outputs_are_normed_and_gated() -> None:
    x, gate, weight = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, SIZE), torch.randn(SIZE)
    for row, one, its in zip(operators.fused_rmsnorm_gated_cpu(x, weight, gate, EPS), x, gate, strict=True):
        assert_close(row, one / one.square().mean().sqrt() * weight * its * its.sigmoid())


def test_a_gate_multiplies_in_place() -> None:
    x, gate = torch.randn(TOKENS, HEADS * SIZE), torch.randn(TOKENS, HEADS, 2 * SIZE)[..., SIZE:]
    expected = x * gate.sigmoid().reshape(TOKENS, -1)
    operators.fused_sigmoid_mul_cpu(x, gate)
    assert_close(x, expected)


def test_one_product_is_cut_into_its_parts() -> None:
    parts = [torch.randn(TOKENS, size) for size in (KV_HEADS * SIZE, KV_HEADS * SIZE, HEADS * SIZE, HEADS * SIZE)]
    b, a = torch.randn(TOKENS, HEADS), torch.randn(TOKENS, HEADS)
    got = operators.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat(parts, -1), torch.cat((b, a), -1), KV_HEADS, HEADS, SIZE, SIZE
    )
    expected = (torch.cat(parts[:3], -1), parts[3].view(TOKENS, HEADS, SIZE), b, a)
    assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(got, expected, strict=True))
