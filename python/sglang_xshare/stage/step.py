"""A decode or verify step of the target model: its phase, its rows and the state of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..types import Batch
from ..upstream.ranks import gather_rows
from .exact import Exact
from .gather import Gather, Ranks

PADDING, LIVE, EXACT = range(3)
"""The states of a row. Ranks exchange these numbers."""
NUM_STATES = 3
GROUPED = "an expert policy groups rows by request, so each request must have the same number of draft tokens"


class StepKey(NamedTuple):
    """The phase and the size of a step. Plans and CUDA graphs are looked up by this key.

    The host reads the key without waiting for the device.
    """

    phase: str
    rows: int
    tokens_per_request: int = 1


@dataclass(frozen=True)
class Step:
    """A decode or verify step of the target model.

    `phase` is "decode" or "verify". `rows` is the number of the router's rows, including padding rows. In a CUDA graph,
    `rows` is the captured size. With data-parallel attention, `rows` includes the rows of all attention ranks, unless
    each rank selects among its own rows.

    On some servers each rank's router gets only the rank's own rows, but the ranks select experts together. `gather`
    then collects the rows of all ranks, and `rows` is the number of these rows. On all other servers `gather` is None.
    """

    phase: str
    rows: int
    batch: Batch
    gather: Gather | None = None

    @property
    def key(self) -> StepKey:
        """The key by which the step's plans and CUDA graphs are looked up."""
        return StepKey(self.phase, self.rows, self.batch.tokens_per_request)


def read_step(
    forward_batch: Any,
    mask_padding: bool,
    ranks: Ranks | None = None,
    exact: Exact | None = None,
    by_depth: bool = False,
) -> Step | None:
    """Return the step of a decode or target-verify forward, or None for any other forward.

    Other forwards are prefill, mixed, idle, split prefill, and drafts that run through the target model's own layers.
    Raises RuntimeError if requests have different numbers of draft tokens.

    `ranks` describes a server in which each rank routes its own rows. `exact` contains the flags for rows of exact
    requests. With `by_depth`, the step contains the depth of each draft token. The number of draft tokens is read in
    every step, because a server may change this number while it runs.

    With data-parallel attention, all ranks run one step together. Its rows are the padded rows of the first rank, then
    the padded rows of the next rank, and so on. A rank without requests is idle, and takes part in the step of the
    other ranks.

    Every rank must read the same step. Otherwise ranks could route the same row differently, and the sum of their
    outputs would be wrong. Ranks could also wait forever for each other's rows. So the step is read only from the
    forward mode and from values that SGLang has synchronized. The mode is decode, verify or idle on all ranks, unless a
    rank prefills.
    """
    key = read_key(forward_batch, ranks)
    if key is None:
        return None
    gather, depth, rows_by_rank = None, None, read_rows_by_rank(forward_batch)
    if ranks is None and rows_by_rank is None:
        valid = live_rows(forward_batch) if mask_padding else None
        flags = None if exact is None else exact.find(key.rows)
        depth = _read_depth(forward_batch, key) if by_depth else None
        return Step(key.phase, key.rows, Batch(valid, key.tokens_per_request, flags, depth=depth))
    states = _read_states(forward_batch, key, exact, by_depth)
    if ranks is None:
        # The rows of each rank end with its padding rows. SGLang's gather orders the states like the hidden states.
        states = gather_rows(states, sum(rows_by_rank or ()), forward_batch)
    else:
        states = ranks.own(states)
        if ranks.together:
            gather = Gather(ranks.divide(forward_batch.global_num_tokens_cpu or []), ranks.rank)
            states = gather.collect(states)
    if by_depth and key.tokens_per_request > 1:
        numbers = states.to(torch.int32)
        states, depth = numbers % NUM_STATES, numbers // NUM_STATES
    flags = None if exact is None else states == EXACT
    return Step(key.phase, len(states), Batch(states != PADDING, key.tokens_per_request, flags, depth=depth), gather)


def read_key(forward_batch: Any, ranks: Ranks | None = None) -> StepKey | None:
    """Return the key of the step that `read_step` returns, without reading from the device.

    If a step has the rows of several ranks, `rows` is their sum after SGLang has padded all of these ranks to the same
    number of rows. Before this padding the key can have more rows than the step, but it is equal on all ranks.
    """
    counts = forward_batch.global_num_tokens_cpu if ranks is not None else read_rows_by_rank(forward_batch)
    if ranks is not None and not ranks.together:
        # Before a replay the rows are not padded yet. SGLang finds the graph by the rows of the rank with the most.
        most = max(counts or [len(forward_batch.out_cache_loc)])
        counts = [-(-most // ranks.share)]
    if counts:
        return _read_synchronized(forward_batch, counts)
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return StepKey("decode", forward_batch.input_ids.shape[0])
    if not mode.is_target_verify():  # a prefill may have embeddings instead of input ids
        return None
    if forward_batch.spec_info is not None and forward_batch.spec_info.is_draft_input():
        return None  # the drafter UNO runs the target's layers, and SGLang marks UNO's drafts as verify
    rows, requests = forward_batch.input_ids.shape[0], forward_batch.batch_size
    if rows and rows % requests:
        raise RuntimeError(f"target-verify of {rows} rows for {requests} requests: {GROUPED}")
    return StepKey("verify", rows, rows // requests if rows else 1)


def read_rows_by_rank(forward_batch: Any) -> list[int] | None:
    """Return the number of rows of each attention rank, including padding rows. Return None for a single rank."""
    counts = forward_batch.global_num_tokens_cpu
    return counts if counts is not None and len(counts) > 1 else None


def _read_synchronized(forward_batch: Any, rows_by_rank: list[int]) -> StepKey | None:
    """Return the key of a step that all ranks run together, or None if a rank prefills. All ranks get the same key."""
    mode = forward_batch.forward_mode
    takes_part = mode.is_target_verify() or mode.is_decode() or mode.is_idle()
    # While one rank prefills, no rank selects experts, even if each rank selects among its own rows: the prefill
    # activates nearly all experts anyway.
    if forward_batch.is_extend_in_batch or not takes_part:
        return None
    spec, rows = forward_batch.spec_info, max(rows_by_rank) * len(rows_by_rank)
    if spec is None or not spec.is_verify_input():
        return StepKey("decode", rows)
    if any(own % spec.draft_token_num for own in rows_by_rank):
        counts = f"{rows_by_rank} rows on the ranks of data-parallel attention for {spec.draft_token_num} draft tokens"
        raise RuntimeError(f"target-verify of {counts}: {GROUPED}")
    return StepKey("verify", rows, spec.draft_token_num)


def _read_states(forward_batch: Any, key: StepKey, exact: Exact | None, by_depth: bool) -> torch.Tensor:
    """Return one number for each of this rank's rows, [rows]. It encodes the row's state and draft depth.

    With `by_depth`, a number is the state plus `NUM_STATES` times the depth. Otherwise a number is the state. All ranks
    exchange these numbers in every step, because no rank can infer whether another rank has exact rows. The exchange
    takes two small operations.
    """
    live = live_rows(forward_batch)
    states = live if exact is None else live * (LIVE + exact.read(len(live)).to(torch.int32))
    depth = _read_depth(forward_batch, key) if by_depth else None
    return states if depth is None else states + NUM_STATES * depth


def _read_depth(forward_batch: Any, key: StepKey) -> torch.Tensor | None:
    """Return the depth of each row in its draft chain or tree, [rows] int32, or None for a decode step.

    Padding rows have an arbitrary depth.
    """
    if key.tokens_per_request == 1:
        return None
    positions = forward_batch.positions.view(-1, key.tokens_per_request)
    return (positions - positions[:, :1]).clamp_min(0).flatten().to(torch.int32)


def live_rows(forward_batch: Any) -> torch.Tensor:
    """Return a mask [rows] bool that is False for padding rows.

    Padding rows and idle ranks write to entry 0 of the KV cache, which belongs to no request. So this entry marks them.
    Each replay of a CUDA graph computes the mask again.
    """
    return forward_batch.out_cache_loc != 0
