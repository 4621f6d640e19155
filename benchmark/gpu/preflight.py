"""Whether upstream's compiled kernels run on this GPU at all, and right: three of them, against plain torch.

python -m benchmark.gpu.preflight
"""

import sys
from collections.abc import Callable

import torch

ROWS, HIDDEN, EXPERTS, TOP_K, BLOCK = 16, 2048, 128, 8, 16


def main() -> int:
    """Run the checks. Returns 1 after the first that fails, named in one line."""
    for name, check in CHECKS.items():
        try:
            right = check()
        except Exception as error:  # whatever a kernel that cannot load or launch raises
            print(f"preflight: {name}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
            return 1
        if not right:
            print(f"preflight: {name}: another answer than torch's", file=sys.stderr)
            return 1
    print(f"preflight: {', '.join(CHECKS)} run on {torch.cuda.get_device_name()}")
    return 0


def check_rmsnorm() -> bool:
    """`sgl_kernel.rmsnorm`, as every layer calls it."""
    import sgl_kernel

    norm: Callable[..., torch.Tensor] = vars(sgl_kernel)["rmsnorm"]  # not in the stand-in for the CPU
    hidden, weight = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16(), torch.rand(HIDDEN, device="cuda").bfloat16()
    expected = torch.nn.functional.rms_norm(hidden.float(), (HIDDEN,), weight.float(), 1e-6)
    return torch.allclose(norm(hidden, weight, 1e-6).float(), expected, rtol=2e-2, atol=2e-2)


def check_router() -> bool:
    """Upstream's fused softmax and top-k."""
    from benchmark.gpu.moe_layer import publish_arguments

    publish_arguments()
    from sglang.srt.layers.moe.topk import TopKConfig, select_experts

    logits = torch.randn(ROWS, EXPERTS, device="cuda")
    routed = select_experts(torch.zeros(ROWS, HIDDEN, device="cuda"), logits, TopKConfig(top_k=TOP_K))
    return torch.equal(routed.topk_ids.long().sort(1).values, logits.topk(TOP_K).indices.sort(1).values)


def check_alignment() -> bool:
    """`moe_align_block_size`, which sorts tokens by expert for the Triton runner."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import moe_align_block_size

    ids = torch.randn(ROWS, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    padded = moe_align_block_size(ids, BLOCK, EXPERTS)[2]
    expected = (torch.bincount(ids.flatten(), minlength=EXPERTS) + BLOCK - 1) // BLOCK * BLOCK
    return int(padded) == int(expected.sum())


CHECKS: dict[str, Callable[[], bool]] = {
    "rmsnorm": check_rmsnorm,
    "router": check_router,
    "alignment": check_alignment,
}

if __name__ == "__main__":
    sys.exit(main())
