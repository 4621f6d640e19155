"""One forward of the target model, as the stage sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..types import Batch
from .upstream import gather_rows


@dataclass(frozen=True)
class Step:
    """`phase` is "decode" or "verify". `rows` counts the router's rows, padding included (a graph's captured size);
    under data-parallel attention those of all its ranks.
    """

    phase: str
    rows: int
    batch: Batch


def read_step(forward_batch: Any, mask_padding: bool) -> Step | None:
    """The step of a decode or target-verify forward; None for every other one (prefill, mixed, idle, split prefill).

    A verify batch is request-major: `batch_size` requests of equally many draft tokens, read here at every step, so
    that a server that adapts its number of draft tokens is followed. Raises RuntimeError for a ragged one.
    """
    rows_by_rank = read_rows_by_rank(forward_batch)
    if rows_by_rank is not None:
        return _read_gathered_step(forward_batch, rows_by_rank)
    mode = forward_batch.forward_mode
    if mode.is_target_verify():  # first: is_extend() is true of it too
        phase = "verify"
    elif mode.is_decode():
        phase = "decode"
    else:
        return None
    rows = forward_batch.input_ids.shape[0]
    tokens_per_request = _count_draft_tokens(rows, forward_batch.batch_size) if phase == "verify" and rows else 1
    valid = live_rows(forward_batch) if mask_padding else None
    return Step(phase, rows, Batch(valid=valid, tokens_per_request=tokens_per_request))


def read_rows_by_rank(forward_batch: Any) -> list[int] | None:
    """How many router rows each rank of data-parallel attention has, padding included, in the order of the ranks; None
    where the router sees this rank's rows alone.
    """
    counts = forward_batch.global_num_tokens_cpu
    return counts if counts is not None and len(counts) > 1 else None


def _read_gathered_step(forward_batch: Any, rows_by_rank: list[int]) -> Step | None:
    """The step of all ranks of data-parallel attention together: the rows of the first, padded, then of the next.

    Every rank must read the same step, or the ranks would add up an expert's output for rows routed differently. So it
    is read from what SGLang has synchronized, and from the mode, which is decode, verify or idle on all ranks where
    none prefills. A rank without requests (idle) takes part in the others' decode or verification. A step in which some
    rank prefills is vanilla on all. Raises RuntimeError where a rank's rows are not whole requests.
    """
    mode = forward_batch.forward_mode
    takes_part = mode.is_target_verify() or mode.is_decode() or mode.is_idle()
    if forward_batch.is_extend_in_batch or not takes_part:
        return None
    spec = forward_batch.spec_info
    draft_tokens = spec.draft_token_num if spec is not None and spec.is_verify_input() else None
    if draft_tokens is not None and any(rows % draft_tokens for rows in rows_by_rank):
        raise RuntimeError(
            f"target-verify of {rows_by_rank} rows on the ranks of data-parallel attention: an expert policy groups "
            f"rows by request; allowed are multiples of the {draft_tokens} draft tokens"
        )
    # Each rank's rows end with its padding. SGLang's gather places the mask as it places the hidden states.
    valid = gather_rows(live_rows(forward_batch), sum(rows_by_rank), forward_batch)
    phase = "decode" if draft_tokens is None else "verify"
    return Step(phase, sum(rows_by_rank), Batch(valid=valid, tokens_per_request=draft_tokens or 1))


def _count_draft_tokens(rows: int, requests: int) -> int:
    if rows % requests:
        raise RuntimeError(
            f"target-verify of {rows} rows for {requests} requests: an expert policy groups rows by request; "
            "allowed is the same number of draft tokens for each"
        )
    return rows // requests


def live_rows(forward_batch: Any) -> torch.Tensor:
    """[rows] bool: which rows are no padding. A graph's replay reads it anew. Padding rows, and all rows of an idle
    rank, write to KV slot 0, which no request ever has.
    """
    return forward_batch.out_cache_loc != 0
