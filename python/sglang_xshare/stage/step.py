"""One forward of the target model, as the stage sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..types import Batch
from .upstream import gather_rows


@dataclass(frozen=True)
class Step:
    """`phase` is "decode" or "verify"; `rows` the router rows, padding included (a graph's captured size). Under
    data-parallel attention these are the rows of all its ranks.
    """

    phase: str
    rows: int
    batch: Batch


def read_step(forward_batch: Any, mask_padding: bool) -> Step | None:
    """The step of a decode or target-verify forward; None for every other one (prefill, mixed, idle, split prefill).

    A verify batch is request-major: `batch_size` requests of equally many draft tokens, read here at every step, so
    that a server that adapts its number of draft tokens is followed. Raises RuntimeError for a ragged one.
    """
    slots = read_slots(forward_batch)
    if slots is not None:
        return _read_gathered_step(forward_batch, slots)
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


def read_slots(forward_batch: Any) -> list[int] | None:
    """Router rows of every attention-DP rank, padding included; None where the router sees this rank's rows alone."""
    counts = forward_batch.global_num_tokens_cpu
    return counts if counts is not None and len(counts) > 1 else None


def _read_gathered_step(forward_batch: Any, slots: list[int]) -> Step | None:
    """The step of all attention-DP ranks together, one slot of rows each, padded.

    Every rank must come to the same one, or their shares of an expert's sum would be routed differently: it is read
    from what SGLang has synchronized, and from the mode, which without a prefill anywhere is decode, verify or idle on
    all. A rank without requests (idle) takes part in the others' decode or verification.
    A step in which some rank prefills is vanilla on all. Raises RuntimeError where a slot does not hold whole requests.
    """
    mode = forward_batch.forward_mode
    takes_part = mode.is_target_verify() or mode.is_decode() or mode.is_idle()
    if forward_batch.is_extend_in_batch or not takes_part:
        return None
    spec = forward_batch.spec_info
    draft_tokens = spec.draft_token_num if spec is not None and spec.is_verify_input() else None
    if draft_tokens is not None and any(rows % draft_tokens for rows in slots):
        raise RuntimeError(
            f"target-verify of {slots} rows on the ranks of data-parallel attention: an expert policy groups rows by "
            f"request; allowed are multiples of the {draft_tokens} draft tokens"
        )
    # Each slot has padding at its own end. SGLang's gather places the mask as it places the hidden states.
    valid = gather_rows(live_rows(forward_batch), sum(slots), forward_batch)
    phase = "decode" if draft_tokens is None else "verify"
    return Step(phase, sum(slots), Batch(valid=valid, tokens_per_request=draft_tokens or 1))


def _count_draft_tokens(rows: int, requests: int) -> int:
    if rows % requests:
        raise RuntimeError(
            f"target-verify of {rows} rows for {requests} requests: an expert policy groups rows by request; "
            "allowed is the same number of draft tokens for each"
        )
    return rows // requests


def live_rows(forward_batch: Any) -> torch.Tensor:
    """[rows] bool, read live in a graph replay: padding rows write to KV slot 0, which is never a request's. So do all
    rows of an idle rank.
    """
    return forward_batch.out_cache_loc != 0
