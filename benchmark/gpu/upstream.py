"""Checks that compare SGLang's compiled kernels with PyTorch."""

from collections.abc import Callable

import torch

from benchmark.gpu.moe_layer import publish_arguments

ROWS, HIDDEN, EXPERTS, TOP_K, BLOCK = 16, 2048, 128, 8, 16


def is_rmsnorm_right() -> bool:
    """Return whether `sgl_kernel.rmsnorm` gives the right result."""
    import sgl_kernel

    norm: Callable[..., torch.Tensor] = vars(sgl_kernel)["rmsnorm"]  # missing in our sgl_kernel for CPUs
    hidden, weight = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16(), torch.rand(HIDDEN, device="cuda").bfloat16()
    expected = torch.nn.functional.rms_norm(hidden.float(), (HIDDEN,), weight.float(), 1e-6)
    return torch.allclose(norm(hidden, weight, 1e-6).float(), expected, rtol=2e-2, atol=2e-2)


def is_router_right() -> bool:
    """Return whether SGLang's fused softmax and top-k kernel gives the right result."""
    publish_arguments()
    from sglang.srt.layers.moe.topk import TopKConfig, select_experts

    logits = torch.randn(ROWS, EXPERTS, device="cuda")
    routed = select_experts(torch.zeros(ROWS, HIDDEN, device="cuda"), logits, TopKConfig(top_k=TOP_K))
    return torch.equal(routed.topk_ids.long().sort(1).values, logits.topk(TOP_K).indices.sort(1).values)


def is_alignment_right() -> bool:
    """Return whether `moe_align_block_size`, which sorts tokens by expert, gives the right result."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import moe_align_block_size

    ids = torch.randn(ROWS, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    padded = moe_align_block_size(ids, BLOCK, EXPERTS)[2]
    expected = (torch.bincount(ids.flatten(), minlength=EXPERTS) + BLOCK - 1) // BLOCK * BLOCK
    return int(padded) == int(expected.sum())


UPSTREAM = {"rmsnorm": is_rmsnorm_right, "router": is_router_right, "alignment": is_alignment_right}
