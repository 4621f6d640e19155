"""The arguments and results of `select`: the model's router, the batch, and the selected experts."""

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

    `correction_bias` [N] is added to the scores when experts are chosen, but not when weights are computed.
    `num_expert_group` and `topk_group` describe a group-limited router; both are given or both are None. `quota_groups`
    is a number of equal groups of experts, each of which contributes its best top_k / quota_groups experts. `scaling`
    and `expert_scale` [N] multiply every normalized weight. `correction_bias` and `expert_scale` have any float dtype.
    Raises ValueError with the name of a wrong key.
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
    """The rows and requests of a batch, and the loaded experts. All tensors are on the device of the logits.

    - `valid` [n] bool marks live rows. None means that all rows are live.
    - `tokens_per_request` is the number of rows of a request. These rows are consecutive.
    - `exact` [n] bool marks rows that are routed as the model routes. A row that is not live is not exact. None means
      that there are no exact rows.
    - `resident` [N] bool marks the loaded experts if a layer holds only `slots` experts and pages the others in. None
      means that all experts are loaded.
    - `depth` [n] int32 is used for trees of drafts. It is the number of rows before a draft on the draft's path. None
      means chains: the depth of a row is its position in the request.

    Raises ValueError with the name of a wrong key.
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
    """The form in which `select` returns slots for an MoE runner. Slots are columns of the expert ids and weights.

    An empty slot has no expert. By default it contains an active expert with weight 0. If `empty` is True, it contains
    -1. `shared` is the number of fused shared experts. They have the last columns, ids from N on, and the weight
    `shared_weight` in every row. `masked` requests `Selection.masked_logits` for a runner that selects from logits
    itself; empty slots then contain -1. `aligned` requests `Selection.alignment`, if the backend computes it. Raises
    ValueError with the name of a wrong key.
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
    """The slots of ids [n, columns] sorted by expert, in the format of SGLang's `moe_align_block_size`.

    Experts ascend. The slots of each expert begin a new block of `selection.alignment.BLOCK` elements. All tensors are
    int32 and on the device of the ids. Elements after the total are undefined.
    """

    sorted_token_ids: torch.Tensor
    """The numbers `row * columns + slot`. The number `n * columns`, which is no slot, fills an expert's last block."""
    expert_ids: torch.Tensor
    """The expert of each block."""
    num_tokens_post_padded: torch.Tensor
    """[1]: the total number of elements in all blocks."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The experts and weights of every row, on the logits' device. Only the reference backend waits for the device."""

    topk_ids: torch.Tensor
    """[n, k] int32: the experts of each row, in descending order of their choice scores. An empty slot contains -1.

    If the plan has `kmax`, the number of columns is `kmax`, but at least k if rows may be exact. `RunnerSlots` may add
    columns and fill empty slots.
    """
    topk_weights: torch.Tensor
    """[n, k] float32: the weights of the experts, with 0 in an empty slot."""
    selected: torch.Tensor
    """[N] bool: the experts that the policy has selected, called S in the documentation."""
    active: torch.Tensor
    """[N] bool: the experts that valid rows use.

    With masked logits there are at least k such experts, because the runner needs k experts.
    """
    rescued: torch.Tensor
    """0-dim int64: the number of rows to which the key `rescue` returned their first choice."""
    vanilla_active: torch.Tensor
    """[N] bool: the experts in the model's own top-k of valid rows."""
    kept_mass: torch.Tensor
    """[n] float32: the total score of a row's experts, divided by the total score of the row's own top-k.

    It is 1 if the divisor is 0. It is 0 in an invalid row.
    """
    masked_logits: torch.Tensor | None = None
    """[n, N] in the dtype of the logits, if `RunnerSlots.masked` is set. See `selection.mask`."""
    alignment: Alignment | None = None
    """The slots sorted by expert. None unless `RunnerSlots.aligned` is set and the Triton kernel ran as one program."""


@dataclass(frozen=True, eq=False)
class Tally:
    """The tensors of a `Selection` that the stage counts. For all layers, their first dimension is the layer."""

    active: torch.Tensor
    vanilla_active: torch.Tensor
    kept_mass: torch.Tensor
    rescued: torch.Tensor

    def of(self, layer: int) -> Tally:
        """Return one layer's part of a tally for all layers."""
        return Tally(self.active[layer], self.vanilla_active[layer], self.kept_mass[layer], self.rescued[layer])

    def take(self, selection: Selection) -> None:
        """Copy the tensors of a selection into this tally."""
        self.active.copy_(selection.active)
        self.vanilla_active.copy_(selection.vanilla_active)
        self.kept_mass.copy_(selection.kept_mass)
        self.rescued.copy_(selection.rescued)


def allocate_tally(new: Callable[..., torch.Tensor], rows: int, experts: int, *layers: int) -> Tally:
    """Return a tally for logits [rows, experts], with a first dimension `layers` if given. `new` allocates tensors."""
    import torch

    active, vanilla_active = (new((*layers, experts), dtype=torch.bool) for _ in range(2))
    return Tally(active, vanilla_active, new((*layers, rows), dtype=torch.float32), new(layers, dtype=torch.int64))


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} = {value!r}: must be an integer of at least 1")
