"""One forward of the target model, as the stage sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..types import Batch
from ..upstream.ranks import gather_rows
from .gather import Gather, Ranks

if TYPE_CHECKING:
    from .exact import Exact

PADDING, LIVE, EXACT, STATES = range(4)
"""What a row is, as ranks exchange it."""


class StepKey(NamedTuple):
    """A step as far as the host knows it; `phase` and `rows` as in `Step`."""

    phase: str
    rows: int
    tokens_per_request: int = 1


@dataclass(frozen=True)
class Step:
    """`phase` is "decode" or "verify". `rows` counts the rows selected among, padding included (a graph's captured
    size): the router's, which under data-parallel attention are those of all its ranks; or those that `gather` collects
    where each rank's router sees its own alone.
    """

    phase: str
    rows: int
    batch: Batch
    gather: Gather | None = None

    @property
    def key(self) -> StepKey:
        """What plans and graphs are found by."""
        return StepKey(self.phase, self.rows, self.batch.tokens_per_request)

    @property
    def is_plain(self) -> bool:
        """True without padding, exact rows, depths of drafts, paged experts and a gather, as of most steps on a CPU."""
        batch = self.batch
        parts = batch.valid, batch.exact, batch.depth, batch.resident, self.gather
        return all(part is None for part in parts)


def read_step(
    forward_batch: Any,
    mask_padding: bool,
    ranks: Ranks | None = None,
    exact: Exact | None = None,
    by_depth: bool = False,
) -> Step | None:
    """The step of a decode or target-verify forward; None for every other one (prefill, mixed, idle, split prefill, a
    draft that runs through the target's own layers).

    A verify batch is request-major: `batch_size` requests of equally many draft tokens, read here at every step, so
    that a server that adapts its number of draft tokens is followed. Raises RuntimeError for a ragged one. `ranks` are
    those of a server whose ranks each route rows of their own; `exact` knows the rows of exact requests. `by_depth`
    asks how deep drafts are.

    With data-parallel attention it is that of all ranks together: the rows of the first, padded, then of the next.
    Every rank must read the same, or the ranks would add up an expert's output for rows routed differently. So it is
    read from what SGLang has synchronized, and from the mode, which is decode, verify or idle on all ranks where none
    prefills. A rank without requests (idle) takes part in the others' decode or verification.
    """
    key = read_key(forward_batch, ranks)
    if key is None:
        return None
    if ranks is not None:
        return _read_own_step(forward_batch, key, ranks, exact, by_depth)
    rows_by_rank = read_rows_by_rank(forward_batch)
    if rows_by_rank is not None:
        # Each rank's rows end with its padding. SGLang's gather places what they are as it places the hidden states.
        states = gather_rows(_read_states(forward_batch, key, exact, by_depth), sum(rows_by_rank), forward_batch)
        return _make_step(states, key, exact, by_depth)
    valid = live_rows(forward_batch) if mask_padding else None
    flags = None if exact is None else exact.find(key.rows)
    depth = _read_depth(forward_batch, key) if by_depth else None
    return Step(key.phase, key.rows, Batch(valid, key.tokens_per_request, flags, depth=depth))


def read_key(forward_batch: Any, ranks: Ranks | None = None) -> StepKey | None:
    """Return the key of `read_step`'s step: where ranks pad each other, with the longest's rows for each. No device is
    touched.
    """
    counts = forward_batch.global_num_tokens_cpu if ranks is not None else read_rows_by_rank(forward_batch)
    if ranks is not None and not ranks.together:
        # Before a graph is replayed no rank has padded its rows: SGLang finds the graph by the most rows of any rank.
        counts = [-(-max(counts or [len(forward_batch.out_cache_loc)]) // ranks.share)]
    if counts:
        found = _read_synchronized(forward_batch, counts)
        return None if found is None else StepKey(found[0], max(counts) * len(counts), found[1])
    mode = forward_batch.forward_mode
    if not (mode.is_target_verify() or mode.is_decode()):  # a prefill may have embeddings in place of ids
        return None
    rows = forward_batch.input_ids.shape[0]
    if mode.is_decode():
        return StepKey("decode", rows)
    if forward_batch.spec_info is not None and forward_batch.spec_info.is_draft_input():
        return None  # UNO drafts with the target's layers and an adapter, in the mode of verification
    return StepKey("verify", rows, _count_draft_tokens(rows, forward_batch.batch_size) if rows else 1)


def read_rows_by_rank(forward_batch: Any) -> list[int] | None:
    """Router rows of each rank of data-parallel attention, padding included; None if the router sees its own."""
    counts = forward_batch.global_num_tokens_cpu
    return counts if counts is not None and len(counts) > 1 else None


def _read_own_step(forward_batch: Any, key: StepKey, ranks: Ranks, exact: Exact | None, by_depth: bool) -> Step:
    """The step of ranks that each route rows of their own: of all together, or of this one alone.

    Ranks that select together must read the same step, as above, or some would wait for the others' rows forever. One
    by itself does not select either while another prefills: in a prefill nearly every expert is active anyway.
    """
    states = ranks.own(_read_states(forward_batch, key, exact, by_depth))
    if not ranks.together:
        return _make_step(states, key, exact, by_depth)
    gather = Gather(ranks.divide(forward_batch.global_num_tokens_cpu or []), ranks.rank)
    return _make_step(gather.collect(states), key, exact, by_depth, gather)


def _read_synchronized(forward_batch: Any, rows_by_rank: list[int]) -> tuple[str, int] | None:
    """(phase, tokens a request) of a step that all ranks take part in, the same on each; None where one prefills."""
    mode = forward_batch.forward_mode
    takes_part = mode.is_target_verify() or mode.is_decode() or mode.is_idle()
    if forward_batch.is_extend_in_batch or not takes_part:
        return None
    spec = forward_batch.spec_info
    if spec is None or not spec.is_verify_input():
        return "decode", 1
    draft_tokens = spec.draft_token_num
    if any(rows % draft_tokens for rows in rows_by_rank):
        raise RuntimeError(
            f"target-verify of {rows_by_rank} rows on the ranks of data-parallel attention: an expert policy groups "
            f"rows by request; allowed are multiples of the {draft_tokens} draft tokens"
        )
    return "verify", draft_tokens


def _count_draft_tokens(rows: int, requests: int) -> int:
    if rows % requests:
        raise RuntimeError(
            f"target-verify of {rows} rows for {requests} requests: an expert policy groups rows by request; "
            "allowed is the same number of draft tokens for each"
        )
    return rows // requests


def _read_states(forward_batch: Any, key: StepKey, exact: Exact | None, by_depth: bool) -> torch.Tensor:
    """[rows] numbers: whether each of this rank's rows is padding, live or exact, and above that how deep a draft. No
    rank knows whether another has exact ones, so that all exchange them, in two small operations a step.
    """
    live = live_rows(forward_batch)
    states = live if exact is None else live * (LIVE + exact.read(len(live)).to(torch.int32))
    depth = _read_depth(forward_batch, key) if by_depth else None
    return states if depth is None else states + STATES * depth


def _read_depth(forward_batch: Any, key: StepKey) -> torch.Tensor | None:
    """[rows] int32: how deep a verify step's rows are in their chain or tree, any for padding; None in other steps."""
    if key.tokens_per_request == 1:
        return None
    positions = forward_batch.positions.view(-1, key.tokens_per_request)
    return (positions - positions[:, :1]).clamp_min(0).flatten().to(torch.int32)


def _make_step(
    states: torch.Tensor, key: StepKey, exact: Exact | None, by_depth: bool, gather: Gather | None = None
) -> Step:
    depth = None
    if by_depth and key.tokens_per_request > 1:
        numbers = states.to(torch.int32)
        states, depth = numbers % STATES, numbers // STATES
    flags = None if exact is None else states == EXACT
    return Step(key.phase, len(states), Batch(states != PADDING, key.tokens_per_request, flags, depth=depth), gather)


def live_rows(forward_batch: Any) -> torch.Tensor:
    """[rows] bool: no padding. Padding and idle ranks write to KV slot 0, never a request's. Replays read it anew."""
    return forward_batch.out_cache_loc != 0
