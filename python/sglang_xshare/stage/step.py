"""One forward of the target model, as the stage sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..types import Batch


@dataclass(frozen=True)
class Step:
    """`phase` is "decode" or "verify"; `rows` the router rows, padding included (a graph's captured size)."""

    phase: str
    rows: int
    batch: Batch


def read_step(forward_batch: Any, mask_padding: bool) -> Step | None:
    """The step of a decode or target-verify forward; None for every other one (prefill, mixed, idle, split prefill).

    A verify batch is request-major: `batch_size` requests of equally many draft tokens, read here at every step, so
    that a server that adapts its number of draft tokens is followed. Raises RuntimeError for a ragged one.
    """
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


def _count_draft_tokens(rows: int, requests: int) -> int:
    if rows % requests:
        raise RuntimeError(
            f"target-verify of {rows} rows for {requests} requests: an expert policy groups rows by request; "
            "allowed is the same number of draft tokens for each"
        )
    return rows // requests


def live_rows(forward_batch: Any) -> torch.Tensor:
    """[rows] bool, read live in a graph replay: padding rows write to KV slot 0, which is never a request's."""
    return forward_batch.out_cache_loc != 0
