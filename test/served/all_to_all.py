"""DeepEP for servers without GPUs: what its dispatcher does to ids and rows, by collectives of gloo and loops on a CPU.

Every rank hands in the rows it has routed, with ids over all experts, -1 in an empty slot, which goes nowhere. All
ranks see all rows, run the experts they hold, and add up.
"""

from typing import Any

import torch
from torch.nn.functional import pad


def lend_all_to_all() -> None:
    """Let CPU servers run with --moe-a2a-backend deepep and its kin; up to 0.5.21 without the number of live rows."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    layer.create_moe_dispatcher = lambda config, **kwargs: StandardDispatcher(config)
    DeepEPMoE.forward_impl = run_experts_of_all
    if not hasattr(topk, "resolve_routing_inputs"):
        forward = topk.TopK.forward_native
        topk.TopK.forward_native = lambda self, *args, **kwargs: forward(
            self, *args, **{**kwargs, "num_token_non_padded": None}
        )


def run_experts_of_all(layer: Any, hidden: torch.Tensor, routed: Any) -> torch.Tensor:
    """In place of DeepEPMoE's: this rank's rows [n, hidden] through the experts of every rank."""
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.tp_group.device_group
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(parallel.tp_size)]
    torch.distributed.all_gather(rows, torch.tensor([len(hidden)]), group=group)
    counts = [int(count) for count in rows]
    logits = routed.router_logits.float() if len(hidden) else torch.zeros(0, layer.num_experts)
    ids = gather(routed.topk_ids.long(), counts, group)  # on an idle rank upstream's are of another type
    here = ids - layer.moe_ep_rank * layer.num_local_experts
    here = here.where((ids >= 0) & (here >= 0) & (here < layer.num_local_experts), -1)
    everyone = StandardTopKOutput(
        gather(routed.topk_weights.float(), counts, group), here, gather(logits, counts, group)
    )
    out = fused_moe_native.moe_forward_native(layer, gather(hidden, counts, group), everyone, layer.moe_runner_config)
    torch.distributed.all_reduce(out, group=group)
    return out.narrow(0, sum(counts[: parallel.tp_rank]), len(hidden)).contiguous()


def gather(own: torch.Tensor, counts: list[int], group: Any) -> torch.Tensor:
    """[rows of all ranks, width], from the [rows, width] of each."""
    equal = pad(own, (0, 0, 0, max(counts) - len(own))).contiguous()
    parts = [torch.empty_like(equal) for _ in counts]
    torch.distributed.all_gather(parts, equal, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
