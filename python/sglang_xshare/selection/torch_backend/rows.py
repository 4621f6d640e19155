"""The ranked rows of a batch, from which the vectorized backend selects."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ...types import Batch, Router
from ..scores import compute_scores, find_depth, measure

# To break ties, a float64 score grows by 2^-40 of itself for each expert with a higher id. Even 1,024 such steps are
# less than the distance between two float32.
_TIE = 2.0**-40
# Bounds of the score that a step is a part of: a score of 0 stays below every positive float32, and -inf stays -inf.
_SMALLEST, _LARGEST = 1e-60, 1e39


class Slots(NamedTuple):
    """Experts of n rows in m slots each. Which slots are empty depends on the logits, so `live` stays on the device."""

    experts: torch.Tensor
    """[n, m] int64; an empty slot has the id of some expert."""
    scores: torch.Tensor
    """[n, m] float32: P, 0 in an empty slot."""
    live: torch.Tensor
    """[n, m] bool: not empty."""

    def keep(self, kept: torch.Tensor) -> Slots:
        """Empty the slots outside `kept` [n, m] bool, and move them behind the others, which keep their order."""
        order = kept.view(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        live = kept.gather(1, order)
        return Slots(self.experts.gather(1, order), torch.where(live, self.scores.gather(1, order), 0.0), live)

    def widen(self, columns: int) -> Slots:
        """Return the slots with empty slots appended, at least `columns` in all."""
        missing = max(columns - self.experts.shape[1], 0)
        return Slots(*(pad(part, (0, missing)) for part in self)) if missing else self


class Rows(NamedTuple):
    """A batch of n rows over N experts; k is the router's top-k."""

    scores: torch.Tensor
    """[n, N] float32: P."""
    measures: torch.Tensor
    """[n, N]: P for sums and comparisons with shares, see `scores.measure`."""
    keys: torch.Tensor
    """[n, N] float64: C with its ties broken, which ranks the row's experts; -inf for a never chosen expert."""
    own: Slots
    """The rows' own top-k, best first."""
    valid: torch.Tensor | None
    """[n, 1] bool; None if all rows are valid."""
    exact: torch.Tensor | None
    """[n, 1] bool: rows that get their own top-k, without utility or votes; None if no row can be exact."""
    batch: Batch
    quota_groups: int | None
    depth: torch.Tensor | None
    """[n, 1] int32: depth of each draft; None if the plan ignores depths."""

    @property
    def num_experts(self) -> int:
        """Return N."""
        return self.keys.shape[1]

    @property
    def num_requests(self) -> int:
        """Return the number of rows over tokens per request."""
        return self.keys.shape[0] // self.batch.tokens_per_request

    @property
    def top_k(self) -> int:
        """Return k."""
        return self.own.experts.shape[1]

    def silence(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [n, m] with 0 or False in exact rows."""
        return values if self.exact is None else values.masked_fill(self.exact, 0)

    def find_best(self, usable: torch.Tensor, count: int) -> Slots:
        """Return every row's `count` best experts among `usable` [N] or [n, N] bool."""
        keys = torch.where(usable, self.keys, -math.inf)
        if self.quota_groups is not None:
            keys = keep_quota(keys, count, self.quota_groups)
        return find_best(self.scores, keys, count, self.valid)


def rank_rows(logits: torch.Tensor, router: Router, batch: Batch, by_depth: bool = False) -> Rows:
    """Score and rank logits [n, N]."""
    scores, choice = compute_scores(logits, router)
    keys = choice.double()
    keys.addcmul_(keys.abs().clamp_(_SMALLEST, _LARGEST), lower_first(keys.shape[1], keys.device), value=_TIE)
    valid = None if batch.valid is None else batch.valid.unsqueeze(1)
    exact = None if batch.exact is None else batch.exact.unsqueeze(1)  # a padding row has no experts anyway
    groups = router.quota_groups
    own_keys = keys if groups is None else keep_quota(keys, router.top_k, groups)
    own = find_best(scores, own_keys, router.top_k, valid)
    return Rows(
        scores=scores,
        measures=measure(scores, router),
        keys=keys,
        own=own,
        valid=valid,
        exact=exact,
        batch=batch,
        quota_groups=groups,
        depth=find_depth(batch, len(logits), logits.device).unsqueeze(1) if by_depth else None,
    )


def find_best(scores: torch.Tensor, keys: torch.Tensor, count: int, valid: torch.Tensor | None) -> Slots:
    """Return every row's `count` largest keys above -inf, best first.

    Further slots are empty, and so are all slots of an invalid row.
    """
    best_keys, experts = keys.topk(count, 1)
    live = best_keys > -math.inf
    if valid is not None:
        live &= valid
    return Slots(experts, torch.where(live, scores.gather(1, experts), 0.0), live)


def keep_quota(keys: torch.Tensor, count: int, groups: int) -> torch.Tensor:
    """Return keys [n, N] with -inf in place of all except the count / groups largest of each group.

    Keys above -inf must differ from each other.
    """
    parts = keys.unflatten(1, (groups, -1))
    last = parts.topk(count // groups, 2).values[..., -1:]
    return parts.masked_fill(parts < last, -math.inf).flatten(1)


def mark(table: torch.Tensor, experts: torch.Tensor, live: torch.Tensor) -> None:
    """Set the entries of a table [N] bool at the live ids among `experts`."""
    # The views are bytes, because CUDA has no scatter that computes `or` on bool.
    values = live.reshape(-1).view(torch.uint8)
    table.view(torch.uint8).scatter_reduce_(0, experts.reshape(-1), values, "amax")


@cache
def lower_first(num_experts: int, device: torch.device) -> torch.Tensor:
    """Return N - 1 - id for each expert [N] float64, which breaks ties.

    The tensor is copied from the host, so a first call inside a graph capture raises an error instead of making a
    tensor that belongs to the graph. The cache never evicts the tensor, because captured graphs read its address. The
    same holds for every cached tensor of this backend.
    """
    return torch.arange(num_experts - 1, -1, -1, dtype=torch.float64, device="cpu").to(device)
