"""Servers that speculate on CPU, and what they must have selected."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.speculative import speculative_flags
from served.probe import read_logits
from sglang_xshare import Batch, Router, build_plan, select

DRAFT_TOKENS = 4
TOP_K = 8
CHAIN = (1, 3, DRAFT_TOKENS)
TREES = ((2, 3, 6), (4, 3, 8))
"""Shapes of a draft: --speculative-eagle-topk, -num-steps, -num-draft-tokens."""


def eagle(model: Path, shape: tuple[int, int, int] = CHAIN) -> tuple[str, ...]:
    """The flags of EAGLE-3 with the checkpoint's draft."""
    return speculative_flags(f"{model}-eagle3", *shape)


def select_again(
    call: dict[str, Any],
    keys: Mapping[str, Any],
    tokens_per_request: int = 1,
    rank_of_expert: Sequence[int] | None = None,
) -> list[int]:
    """The active experts of a policy in a recorded call, by the reference selection."""
    batch = Batch(tokens_per_request=tokens_per_request)
    plan = build_plan(dict(keys))
    selection = select(read_logits(call), plan, Router(TOP_K), batch, rank_of_expert, backend="reference")
    return selection.active.nonzero().flatten().tolist()
