"""Servers that speculate on CPU, and what they must have selected."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.speculative import speculative_flags
from served.probe import read_logits
from sglang_xshare import Batch, Router, Selection, build_plan, select

DRAFT_TOKENS = 4
TOP_K = 8
CHAIN = (1, 3, DRAFT_TOKENS)
TREES = ((2, 3, 6), (4, 3, 8))
"""Shapes of a draft: --speculative-eagle-topk, -num-steps, -num-draft-tokens."""


def eagle(model: Path, shape: tuple[int, int, int] = CHAIN) -> tuple[str, ...]:
    """The flags of EAGLE-3 with the checkpoint's draft."""
    return speculative_flags(f"{model}-eagle3", *shape)


def compute(
    call: dict[str, Any], keys: Mapping[str, Any], batch: Batch, rank_of_expert: Sequence[int] | None = None
) -> Selection:
    """The reference selection over a recorded call."""
    return select(read_logits(call), build_plan(dict(keys)), Router(TOP_K), batch, rank_of_expert, backend="reference")


def select_again(
    call: dict[str, Any],
    keys: Mapping[str, Any],
    tokens_per_request: int = 1,
    rank_of_expert: Sequence[int] | None = None,
) -> list[int]:
    """The active experts of a policy in a recorded call, by the reference selection."""
    selection = compute(call, keys, Batch(tokens_per_request=tokens_per_request), rank_of_expert)
    return selection.active.nonzero().flatten().tolist()
