"""The rows of a batch with their ranked experts. The vectorized backend selects experts from these rows."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ...types import Batch, Router
from ..scores import compute_scores, find_depth, measure

# To break ties, a score in float64 grows by 2^-40 of itself for each expert with a higher id. Even 1,024 such steps are
# smaller than the distance between two neighboring float32 numbers.
_TIE = 2.0**-40
# The absolute value of the score is clamped to these bounds before the step is computed. A score of 0 therefore stays
# below every positive float32, and -inf stays -inf.
_SMALLEST, _LARGEST = 1e-60, 1e39


class Slots(NamedTuple):
    """The experts of n rows, with m slots for each row.

    The logits decide which slots are empty, so `live` stays on the device.
    """

    experts: torch.Tensor
    """[n, m] int64: the expert in each slot. An empty slot contains the id of an arbitrary expert."""
    scores: torch.Tensor
    """[n, m] float32: the score P of the expert in each slot, or 0 in an empty slot."""
    live: torch.Tensor
    """[n, m] bool: whether a slot contains an expert."""

    def keep(self, kept: torch.Tensor) -> Slots:
        """Return the slots that `kept` marks, followed by empty slots.

        `kept` is a tensor [n, m] bool. The marked slots stay in order.
        """
        order = kept.view(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        live = kept.gather(1, order)
        return Slots(self.experts.gather(1, order), torch.where(live, self.scores.gather(1, order), 0.0), live)

    def widen(self, columns: int) -> Slots:
        """Return the slots with empty slots appended. Each row then has at least `columns` slots."""
        missing = max(columns - self.experts.shape[1], 0)
        return Slots(*(pad(part, (0, missing)) for part in self)) if missing else self


class Rows(NamedTuple):
    """A batch of n rows and N experts. The router's top-k is k."""

    scores: torch.Tensor
    """[n, N] float32: the scores P."""
    measures: torch.Tensor
    """[n, N]: the values of P that are summed and compared with shares; see `scores.measure`."""
    keys: torch.Tensor
    """[n, N] float64: C without ties. It ranks the experts of a row. It is -inf for an expert that is never chosen."""
    own: Slots
    """The rows' own top-k, best first."""
    valid: torch.Tensor | None
    """[n, 1] bool: the valid rows, or None if all rows are valid."""
    exact: torch.Tensor | None
    """[n, 1] bool: the rows that get their own top-k and have no utility and no votes. None if no row can be exact."""
    batch: Batch
    quota_groups: int | None
    depth: torch.Tensor | None
    """[n, 1] int32: the depth of each row, or None if the plan ignores depths."""

    @property
    def num_experts(self) -> int:
        """Return N, the number of experts."""
        return self.keys.shape[1]

    @property
    def num_requests(self) -> int:
        """Return the number of requests."""
        return self.keys.shape[0] // self.batch.tokens_per_request

    @property
    def top_k(self) -> int:
        """Return k, the router's top-k."""
        return self.own.experts.shape[1]

    def silence(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [n, m], set to 0 or False in exact rows."""
        return values if self.exact is None else values.masked_fill(self.exact, 0)

    def find_best(self, usable: torch.Tensor, count: int) -> Slots:
        """Return the `count` best experts of every row.

        `usable` [N] or [n, N] bool marks the experts that a row may get.
        """
        keys = torch.where(usable, self.keys, -math.inf)
        if self.quota_groups is not None:
            keys = keep_quota(keys, count, self.quota_groups)
        return find_best(self.scores, keys, count, self.valid)


def rank_rows(logits: torch.Tensor, router: Router, batch: Batch, by_depth: bool = False) -> Rows:
    """Return the rows of logits [n, N]. Each row contains its scores and its ranked experts."""
    scores, choice = compute_scores(logits, router)
    keys = choice.double()
    keys.addcmul_(keys.abs().clamp_(_SMALLEST, _LARGEST), lower_first(keys.shape[1], keys.device), value=_TIE)
    valid = None if batch.valid is None else batch.valid.unsqueeze(1)
    exact = None if batch.exact is None else batch.exact.unsqueeze(1)  # may include padding rows, which have no experts
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
    """Return the `count` experts of every row that have the largest keys, best first.

    A slot is empty if its key is -inf or its row is invalid.
    """
    best_keys, experts = keys.topk(count, 1)
    live = best_keys > -math.inf
    if valid is not None:
        live &= valid
    return Slots(experts, torch.where(live, scores.gather(1, experts), 0.0), live)


def keep_quota(keys: torch.Tensor, count: int, groups: int) -> torch.Tensor:
    """Return keys [n, N] in which each group of experts keeps its best keys. All other keys are -inf.

    A group keeps count / groups keys. Keys above -inf must differ from each other.
    """
    parts = keys.unflatten(1, (groups, -1))
    last = parts.topk(count // groups, 2).values[..., -1:]
    return parts.masked_fill(parts < last, -math.inf).flatten(1)


def mark(table: torch.Tensor, experts: torch.Tensor, live: torch.Tensor) -> None:
    """Set the entries of a table [N] bool for the experts in live slots."""
    # The views are bytes, because CUDA has no scatter that computes `or` on bool.
    values = live.reshape(-1).view(torch.uint8)
    table.view(torch.uint8).scatter_reduce_(0, experts.reshape(-1), values, "amax")


@cache
def lower_first(num_experts: int, device: torch.device) -> torch.Tensor:
    """Return a tensor [N] float64 that breaks ties. The number of an expert is N - 1 - id.

    The tensor is copied from the host. A first call during a graph capture therefore raises an error. Without the copy
    it would make a tensor that belongs to the graph. The cache never evicts the tensor, because captured graphs read
    its address. Both facts hold for every cached tensor of this backend.
    """
    return torch.arange(num_experts - 1, -1, -1, dtype=torch.float64, device="cpu").to(device)
