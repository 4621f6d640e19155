"""What is wrong with an alignment, by the contract of upstream's fused MoE runner."""

import torch

from sglang_xshare.selection.alignment import BLOCK, align_pairs
from sglang_xshare.types import Alignment


def find_problems(alignment: Alignment, ids: torch.Tensor, block_size: int = BLOCK) -> list[str]:
    """Return how an alignment of `ids` [n, columns] breaks upstream's contract: [] if it does not.

    The order of an expert's pairs is free. The host waits for the device.
    """
    expected = align_pairs(ids, block_size)
    total, pairs = int(expected.num_tokens_post_padded), ids.numel()
    if any(one.dtype != torch.int32 for one in alignment):
        return ["a tensor is not int32"]
    if alignment.num_tokens_post_padded.tolist() != [total]:
        return [f"the total is {alignment.num_tokens_post_padded.tolist()}, not {total}"]
    if len(alignment.sorted_token_ids) < total or len(alignment.expert_ids) < total // block_size:
        return ["pairs lie behind the end"]
    experts, blocks = alignment.expert_ids[: total // block_size], alignment.sorted_token_ids[:total]
    if not torch.equal(experts, expected.expert_ids[: total // block_size]):
        return ["the experts of the blocks differ"]
    if bool(((blocks < 0) | (blocks > pairs)).any()):
        return ["an element is no pair"]
    whose = experts.repeat_interleave(block_size).long() * (pairs + 1)
    found, wanted = ((whose + one).sort().values for one in (blocks, expected.sorted_token_ids[:total]))
    return [] if torch.equal(found, wanted) else ["an expert has other pairs"]
