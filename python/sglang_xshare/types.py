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
    """The properties of the model's router, without the logits and without fused shared experts.

    - `correction_bias` [N] is added to the scores when experts are chosen, but not when weights are computed.
    - `num_expert_group` and `topk_group` describe a group-limited router. Both are set, or both are None.
    - `quota_groups` is a number of equal groups of experts. Each group contributes its best top_k / quota_groups
      experts.
    - `scaling` and `expert_scale` [N] multiply every weight, after any renormalization.

    `correction_bias` and `expert_scale` may have any float dtype. Raises ValueError with the name of a wrong key.
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

    - `valid` [n] bool is False for padding rows. None means that there are no padding rows.
    - `tokens_per_request` is the number of rows of a request. These rows are consecutive.
    - `exact` [n] bool marks rows that the model routes without the policy. A padding row is never exact. None means
      that there are no exact rows.
    - `resident` [N] bool marks the loaded experts if experts are paged. A layer then holds only `slots` experts. None
      means that all experts are loaded.
    - `depth` [n] int32 is used for trees of drafts. It is the depth of each row in its tree, and a root has depth 0.
      None means chains: the depth of a row is its position in the request.

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
    """The form of the slots that an MoE runner needs. A slot is a column of the expert ids and weights.

    - `shared` is the number of fused shared experts. They have the last columns, and ids from N on.
    - `shared_weight` is the weight of each shared expert in every row.
    - `masked` requests `Selection.masked_logits` for a runner that selects from the logits itself. Empty slots then
      contain -1.
    - `empty` decides what an empty slot contains. If it is True, the slot contains -1. By default the slot contains an
      active expert with weight 0.
    - `aligned` requests `Selection.alignment`, if the backend computes it.

    Raises ValueError with the name of a wrong key.
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
    """The slots of expert ids [n, columns], sorted by expert. The format is that of SGLang's `moe_align_block_size`.

    Expert ids ascend. The slots of each expert start a new block of `selection.alignment.BLOCK` elements. All tensors
    are int32 and on the device of the expert ids. Elements after `num_tokens_post_padded` are undefined.
    """

    sorted_token_ids: torch.Tensor
    """The numbers `row * columns + slot`. The rest of an expert's last block contains the number `n * columns`."""
    expert_ids: torch.Tensor
    """The expert of each block."""
    num_tokens_post_padded: torch.Tensor
    """[1]: the total number of elements in all blocks."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The result of `select`: the experts and weights of every row.

    All tensors are on the device of the logits. The host waits for the device only with the reference backend.
    """

    topk_ids: torch.Tensor
    """[n, k] int32: the experts of each row, in descending order of their choice scores. An empty slot contains -1.

    If the plan has `kmax`, there are `kmax` columns, or at least k columns if rows may be exact. `RunnerSlots` may add
    columns and fill empty slots.
    """
    topk_weights: torch.Tensor
    """[n, k] float32: the weights of the experts, with 0 in an empty slot."""
    selected: torch.Tensor
    """[N] bool: the experts that the policy has selected, called S in the documentation."""
    active: torch.Tensor
    """[N] bool: the experts that rows use. Padding rows do not count.

    With masked logits there are at least k such experts, because the runner needs k experts.
    """
    rescued: torch.Tensor
    """0-dim int64: the number of rows that have an expert only because of the policy's key `rescue`."""
    vanilla_active: torch.Tensor
    """[N] bool: the experts that would be active if the model routed without a policy."""
    kept_mass: torch.Tensor
    """[n] float32: the total score of a row's experts, divided by the total score of the row's own top-k.

    It is 1 if the divisor is 0, and 0 in a padding row.
    """
    masked_logits: torch.Tensor | None = None
    """[n, N] in the dtype of the logits, if `RunnerSlots.masked` is set. See `selection.mask`."""
    alignment: Alignment | None = None
    """The slots sorted by expert. None unless `RunnerSlots.aligned` is set and the Triton kernel ran as one program."""


@dataclass(frozen=True, eq=False)
class Tally:
    """The tensors of a `Selection` that the expert-selection stage counts.

    In a tally for all layers, the first dimension of each tensor is the layer.
    """

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
    """Return a tally for logits [rows, experts]. If `layers` is given, the tally is for this number of layers.

    `new` allocates a tensor, as `Tensor.new_empty` does.
    """
    import torch

    active, vanilla_active = (new((*layers, experts), dtype=torch.bool) for _ in range(2))
    return Tally(active, vanilla_active, new((*layers, rows), dtype=torch.float32), new(layers, dtype=torch.int64))


def _check_count(key: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} = {value!r}: must be an integer of at least 1")
