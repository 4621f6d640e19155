"""The step of one forward of the target model: its phase, its rows and the state of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..types import Batch
from ..upstream.ranks import gather_rows
from .exact import Exact
from .gather import Gather, Ranks

PADDING, LIVE, EXACT = range(3)
"""The states of a row, as ranks exchange them."""
NUM_STATES = 3
GROUPED = "an expert policy groups rows by request, so each request must have the same number of draft tokens"


class StepKey(NamedTuple):
    """The key of plans and graphs: what the host reads of a step without the device; fields are as in `Step`."""

    phase: str
    rows: int
    tokens_per_request: int = 1


@dataclass(frozen=True)
class Step:
    """A decode or verify forward: `phase` is "decode" or "verify".

    `rows` counts the router's rows, padding included (a graph's captured size); with data-parallel attention, the rows
    of all its ranks. If each rank's router has its own rows alone, `gather` collects the rows of all ranks, and `rows`
    counts these.
    """

    phase: str
    rows: int
    batch: Batch
    gather: Gather | None = None

    @property
    def key(self) -> StepKey:
        """The key by which plans and graphs are found."""
        return StepKey(self.phase, self.rows, self.batch.tokens_per_request)


def read_step(
    forward_batch: Any,
    mask_padding: bool,
    ranks: Ranks | None = None,
    exact: Exact | None = None,
    by_depth: bool = False,
) -> Step | None:
    """Return the step of a decode or target-verify forward; None for any other forward.

    Other forwards are prefill, mixed, idle, split prefill, and drafts that run through the target's own layers. Raises
    RuntimeError if requests have different numbers of draft tokens.

    `ranks` describe a server whose ranks each route their own rows. `exact` holds the rows of exact requests. With
    `by_depth` the step has the depth of each draft. The number of draft tokens is read in every step, because a server
    may adapt it.

    With data-parallel attention all ranks together have one step: the rows of the first rank, padded, then the rows of
    the next. Every rank must read the same step: otherwise ranks would add up an expert's output for rows that they
    routed differently, or wait forever for each other's rows. So the step is read from what SGLang has synchronized,
    and from the mode, which is decode, verify or idle on all ranks unless one prefills. A rank without requests (idle)
    takes part in the step of the others.
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
        # Each rank's rows end with its padding. SGLang's gather orders the states like the hidden states.
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
    """Return the key of the step that `read_step` returns. The device is not read.

    If SGLang pads all ranks to one size, each rank counts as many rows as the largest.
    """
    counts = forward_batch.global_num_tokens_cpu if ranks is not None else read_rows_by_rank(forward_batch)
    if ranks is not None and not ranks.together:
        # Before a replay the rows are not padded yet, and SGLang finds the graph by the most rows of any rank.
        most = max(counts or [len(forward_batch.out_cache_loc)])
        counts = [-(-most // ranks.share)]
    if counts:
        return _read_synchronized(forward_batch, counts)
    mode = forward_batch.forward_mode
    if not (mode.is_target_verify() or mode.is_decode()):  # a prefill may have embeddings in place of ids
        return None
    rows = forward_batch.input_ids.shape[0]
    if mode.is_decode():
        return StepKey("decode", rows)
    if forward_batch.spec_info is not None and forward_batch.spec_info.is_draft_input():
        return None  # the drafter UNO runs the target's layers, and SGLang marks its drafts as verify
    requests = forward_batch.batch_size
    if rows and rows % requests:
        raise RuntimeError(f"target-verify of {rows} rows for {requests} requests: {GROUPED}")
    return StepKey("verify", rows, rows // requests if rows else 1)


def read_rows_by_rank(forward_batch: Any) -> list[int] | None:
    """Return the router rows of each rank of data-parallel attention, padding included; None if there is one rank."""
    counts = forward_batch.global_num_tokens_cpu
    return counts if counts is not None and len(counts) > 1 else None


def _read_synchronized(forward_batch: Any, rows_by_rank: list[int]) -> StepKey | None:
    """Return the key of a step in which all ranks take part, the same on each rank; None if a rank prefills."""
    mode = forward_batch.forward_mode
    takes_part = mode.is_target_verify() or mode.is_decode() or mode.is_idle()
    # While one rank prefills, no rank selects, not even among its own rows: nearly all experts are active then.
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
    """Return [rows] numbers: the state of each of this rank's rows, plus `NUM_STATES` times the depth of the draft.

    All ranks exchange these numbers, in two small operations a step, because no rank can infer whether another rank has
    exact rows.
    """
    live = live_rows(forward_batch)
    states = live if exact is None else live * (LIVE + exact.read(len(live)).to(torch.int32))
    depth = _read_depth(forward_batch, key) if by_depth else None
    return states if depth is None else states + NUM_STATES * depth


def _read_depth(forward_batch: Any, key: StepKey) -> torch.Tensor | None:
    """Return [rows] int32, the depth of a verify step's rows in their chain or tree; None for a decode step.

    Padding rows have an arbitrary depth.
    """
    if key.tokens_per_request == 1:
        return None
    positions = forward_batch.positions.view(-1, key.tokens_per_request)
    return (positions - positions[:, :1]).clamp_min(0).flatten().to(torch.int32)


def live_rows(forward_batch: Any) -> torch.Tensor:
    """Return [rows] bool, False for padding rows, read anew in each replay of a graph.

    Padding rows and idle ranks write to entry 0 of the KV cache, which no request has.
    """
    return forward_batch.out_cache_loc != 0
