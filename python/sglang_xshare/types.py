"""What selection takes and gives: the model's router, the batch, and the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True, eq=False)
class Router:
    """How the model routes, apart from the logits. Fused shared experts are not part of it.

    `correction_bias` [N], any float dtype, is added to the scores to choose, never to weigh. `num_expert_group` and
    `topk_group` are both given (a group-limited router) or both None. With `quota_groups`, each of so many equal groups
    of experts gives its top_k / quota_groups best. `scaling` multiplies every weight, and so does its expert's
    `expert_scale` [N], any float dtype, once they are normalized. Raises ValueError naming the key.
    """

    top_k: int
    scoring: str = "softmax"
    correction_bias: torch.Tensor | None = None
    renormalize: bool = True
    num_expert_group: int | None = None
    topk_group: int | None = None
    scaling: float = 1.0
    quota_groups: int | None = None
    expert_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_count("top_k", self.top_k)
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring = {self.scoring!r}: allowed is {', '.join(SCORINGS)}")
        if (self.num_expert_group is None) != (self.topk_group is None):
            groups = f"num_expert_group = {self.num_expert_group!r}, topk_group = {self.topk_group!r}"
            raise ValueError(f"{groups}: allowed is both or neither")
        for key in ("num_expert_group", "topk_group", "quota_groups"):
            if getattr(self, key) is not None:
                _check_count(key, getattr(self, key))
        if self.quota_groups is not None and self.top_k % self.quota_groups:
            raise ValueError(f"quota_groups = {self.quota_groups}: allowed is a divisor of top_k = {self.top_k}")
        if self.quota_groups is not None and self.num_expert_group is not None:
            raise ValueError(f"quota_groups = {self.quota_groups}: allowed only without num_expert_group")
        if type(self.scaling) not in (int, float) or not 0 < self.scaling < math.inf:
            raise ValueError(f"scaling = {self.scaling!r}: allowed is a finite number above 0")


@dataclass(frozen=True, eq=False)
class Batch:
    """Which of the router's rows are live, and which belong together.

    `valid` [n] bool on the logits' device, None where every row is live. Rows `[r * T, (r + 1) * T)` with
    T = `tokens_per_request` are one request. `exact` [n] bool, beside `valid`, marks rows that are routed as the model
    itself would, None where none is; one that is not live is none. `resident` [N] bool on the same device says which
    experts are loaded already, where experts are paged into `slots` slots a layer; None where all are there. `depth`
    [n] int32, beside `valid`, says how many rows of its request each draft of a tree follows on; None where drafts are
    chains, in which that is the row's place. Raises ValueError naming the key.
    """

    valid: torch.Tensor | None = None
    tokens_per_request: int = 1
    exact: torch.Tensor | None = None
    resident: torch.Tensor | None = None
    slots: int | None = None
    depth: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_count("tokens_per_request", self.tokens_per_request)
        if self.slots is not None:
            _check_count("slots", self.slots)


@dataclass(frozen=True)
class RunnerSlots:
    """Asks `select()` for what an MoE runner takes: an empty slot holds an expert that is active anyway, with weight 0,
    or stays `empty` (-1) for a runner that drops those.

    `shared` fused shared experts, numbered from N on, have a column each behind the others, with `shared_weight` in
    every row. `masked` asks, for a runner that ranks logits itself, for `Selection.masked_logits`, and leaves empty
    slots empty. `aligned` asks for `Selection.alignment`, if the backend writes it. Raises ValueError naming the key.
    """

    shared: int = 0
    shared_weight: float = 1.0
    masked: bool = False
    empty: bool = False
    aligned: bool = False

    def __post_init__(self) -> None:
        if type(self.shared) is not int or self.shared < 0:
            raise ValueError(f"shared = {self.shared!r}: allowed is an integer of at least 0")
        if self.masked and self.shared:
            raise ValueError("masked = True: allowed only without shared experts")
        if self.empty and self.masked:
            raise ValueError("empty = True: allowed only without masked")


class Alignment(NamedTuple):
    """The (row, slot) pairs of ids [n, columns] sorted by expert, as SGLang's `moe_align_block_size` returns them.

    Experts ascend, and each expert's pairs begin a new block. All tensors are int32 and on the ids' device. Nothing
    behind the total is meaningful.
    """

    sorted_token_ids: torch.Tensor
    """Pairs `row * columns + slot`; `n * columns`, which is no pair, fills an expert's last block."""
    expert_ids: torch.Tensor
    """The expert of each block."""
    num_tokens_post_padded: torch.Tensor
    """[1]: the total of the blocks' elements."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Where every row goes. All tensors are on the logits' device; only the reference has waited for them."""

    topk_ids: torch.Tensor
    """[n, k] (`kmax` columns where the plan says so, at least k where rows may be exact) int32, descending choice
    score, -1 in an empty slot; with more columns, and none empty, where `RunnerSlots` asked for that.
    """
    topk_weights: torch.Tensor
    """[n, k] float32, 0 in an empty slot."""
    selected: torch.Tensor
    """[N] bool: the set S."""
    active: torch.Tensor
    """[N] bool: experts in a slot of a valid row; with masked logits as many more as make k."""
    rescued: torch.Tensor
    """0-dim int64: rows that `rescue` saved."""
    vanilla_active: torch.Tensor
    """[N] bool: experts in the model's own top-k of the valid rows."""
    kept_mass: torch.Tensor
    """[n] float32: the sum of a row's scores at its chosen experts over that at its own top-k; 1 where the latter is 0,
    0 in an invalid row.
    """
    masked_logits: torch.Tensor | None = None
    """[n, N] in the logits' dtype, where `RunnerSlots.masked` asked for it: see `selection.mask`."""
    alignment: Alignment | None = None
    """The slots by expert in blocks of `selection.alignment.BLOCK`, where `RunnerSlots.aligned` asked for the alignment
    and the Triton kernel ran as one program; None otherwise.
    """


@dataclass(frozen=True, eq=False)
class Tally:
    """Where `select()` leaves what is counted: tensors like its fields of these names, or tables [layers, ...]."""

    active: torch.Tensor
    vanilla_active: torch.Tensor
    kept_mass: torch.Tensor
    rescued: torch.Tensor

    def of(self, layer: int) -> Tally:
        """One layer's rows of the tables."""
        return Tally(self.active[layer], self.vanilla_active[layer], self.kept_mass[layer], self.rescued[layer])

    def take(self, selection: Selection) -> None:
        """Copy from a selection that lies elsewhere."""
        self.active.copy_(selection.active)
        self.vanilla_active.copy_(selection.vanilla_active)
        self.kept_mass.copy_(selection.kept_mass)
        self.rescued.copy_(selection.rescued)


def allocate_tally(new: Callable[..., torch.Tensor], rows: int, experts: int, *layers: int) -> Tally:
    """A tally of selections from logits [rows, experts], [layers, ...] where `layers` are given. `new`: a tensor's
    `new_empty` or `new_zeros`.
    """
    import torch

    active, vanilla_active = (new((*layers, experts), dtype=torch.bool) for _ in range(2))
    return Tally(active, vanilla_active, new((*layers, rows), dtype=torch.float32), new(layers, dtype=torch.int64))


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} = {value!r}: allowed is an integer of at least 1")
