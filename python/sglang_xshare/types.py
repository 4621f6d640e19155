"""Arguments and results of a selection: the model's router, the batch, the answer."""

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
    """The model's router, without the logits and without fused shared experts.

    `correction_bias` [N], any float dtype, is added to the scores for the choice, not for the weights.
    `num_expert_group` and `topk_group` are both given (a group-limited router) or both None. Each of `quota_groups`
    equal groups of experts contributes its top_k / quota_groups best. `scaling` and the expert's `expert_scale` [N],
    any float dtype, multiply every normalized weight. Raises ValueError naming the key.
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
            raise ValueError(f"scoring = {self.scoring!r}: must be one of {', '.join(SCORINGS)}")
        if (self.num_expert_group is None) != (self.topk_group is None):
            groups = f"num_expert_group = {self.num_expert_group!r}, topk_group = {self.topk_group!r}"
            raise ValueError(f"{groups}: must be both set or both None")
        for key in ("num_expert_group", "topk_group", "quota_groups"):
            if getattr(self, key) is not None:
                _check_count(key, getattr(self, key))
        if self.quota_groups is not None and self.top_k % self.quota_groups:
            raise ValueError(f"quota_groups = {self.quota_groups}: must be a divisor of top_k = {self.top_k}")
        if self.quota_groups is not None and self.num_expert_group is not None:
            raise ValueError(f"quota_groups = {self.quota_groups}: must be None beside num_expert_group")
        if type(self.scaling) not in (int, float) or not 0 < self.scaling < math.inf:
            raise ValueError(f"scaling = {self.scaling!r}: must be a finite number above 0")


@dataclass(frozen=True, eq=False)
class Batch:
    """The live rows of a batch, its requests, and its loaded experts. All tensors are on the logits' device.

    `valid` [n] bool marks live rows; None if all rows are live. Rows `[r * T, (r + 1) * T)` with T =
    `tokens_per_request` are one request. `exact` [n] bool marks rows that are routed as the model routes; None without
    such rows; a row that is not live is not exact. `resident` [N] bool marks the loaded experts if a layer holds only
    `slots` experts and pages others in; None if all experts are loaded. `depth` [n] int32 is the number of rows before
    each draft of a tree on its path; None for chains, in which the depth is the row's place in its request. Raises
    ValueError naming the key.
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
    """The form in which an MoE runner takes a row's slots, the columns of ids and weights, from `select()`.

    A slot without an expert is empty: it contains an active expert with weight 0, or -1 with `empty`, for a runner that
    drops -1. `shared` fused shared experts, numbered from N on, have the last columns, with `shared_weight` in every
    row. `masked` requests `Selection.masked_logits`, for a runner that ranks logits itself, and leaves -1 in empty
    slots. `aligned` requests `Selection.alignment`, if the backend writes it. Raises ValueError naming the key.
    """

    shared: int = 0
    shared_weight: float = 1.0
    masked: bool = False
    empty: bool = False
    aligned: bool = False

    def __post_init__(self) -> None:
        if type(self.shared) is not int or self.shared < 0:
            raise ValueError(f"shared = {self.shared!r}: must be an integer of at least 0")
        if self.masked and self.shared:
            raise ValueError("masked = True: must be False with shared experts")
        if self.empty and self.masked:
            raise ValueError("empty = True: must be False with masked")


class Alignment(NamedTuple):
    """The (row, slot) pairs of ids [n, columns] sorted by expert, as SGLang's `moe_align_block_size` returns them.

    Experts ascend, and each expert's pairs begin a new block of `selection.alignment.BLOCK` elements. All tensors are
    int32 and on the ids' device. Elements after the total are undefined.
    """

    sorted_token_ids: torch.Tensor
    """Pairs `row * columns + slot`; `n * columns`, which is no pair, fills an expert's last block."""
    expert_ids: torch.Tensor
    """The expert of each block."""
    num_tokens_post_padded: torch.Tensor
    """[1]: the total of the blocks' elements."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The experts and weights of every row, on the logits' device. Only the reference waits for the device."""

    topk_ids: torch.Tensor
    """[n, k] int32 (`kmax` columns if the plan has it, at least k if rows may be exact), in descending choice score, -1
    in an empty slot. `RunnerSlots` may add columns and fill empty slots.
    """
    topk_weights: torch.Tensor
    """[n, k] float32, 0 in an empty slot."""
    selected: torch.Tensor
    """[N] bool: the set S."""
    active: torch.Tensor
    """[N] bool: experts in a slot of a valid row; with masked logits filled up to k experts, which the runner needs."""
    rescued: torch.Tensor
    """0-dim int64: rows that `rescue` saved."""
    vanilla_active: torch.Tensor
    """[N] bool: experts in the model's own top-k of the valid rows."""
    kept_mass: torch.Tensor
    """[n] float32: the sum of a row's scores at its chosen experts, divided by the sum at its own top-k; 1 if the
    latter is 0, 0 in an invalid row.
    """
    masked_logits: torch.Tensor | None = None
    """[n, N] in the logits' dtype, if `RunnerSlots.masked` is set: see `selection.mask`."""
    alignment: Alignment | None = None
    """The slots by expert in blocks of `selection.alignment.BLOCK`, if `RunnerSlots.aligned` is set and the Triton
    kernel ran as one program; None otherwise.
    """


@dataclass(frozen=True, eq=False)
class Tally:
    """The tensors of a `Selection` that are counted, under the same names; for all layers they are [layers, ...]."""

    active: torch.Tensor
    vanilla_active: torch.Tensor
    kept_mass: torch.Tensor
    rescued: torch.Tensor

    def of(self, layer: int) -> Tally:
        """Return one layer's part of a tally of all layers."""
        return Tally(self.active[layer], self.vanilla_active[layer], self.kept_mass[layer], self.rescued[layer])

    def take(self, selection: Selection) -> None:
        """Copy the tensors of a selection."""
        self.active.copy_(selection.active)
        self.vanilla_active.copy_(selection.vanilla_active)
        self.kept_mass.copy_(selection.kept_mass)
        self.rescued.copy_(selection.rescued)


def allocate_tally(new: Callable[..., torch.Tensor], rows: int, experts: int, *layers: int) -> Tally:
    """Return a tally for logits [rows, experts], for `layers` if given; `new` allocates, as a tensor's `new_empty`."""
    import torch

    active, vanilla_active = (new((*layers, experts), dtype=torch.bool) for _ in range(2))
    return Tally(active, vanilla_active, new((*layers, rows), dtype=torch.float32), new(layers, dtype=torch.int64))


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} = {value!r}: must be an integer of at least 1")
