"""The layers of a model whose experts are paged into slots: the loaded experts, and the steps that surely fit."""

from collections.abc import Sequence
from typing import Any

import torch

from ..upstream.paging import Residents
from .frame import ModelForward
from .layer import Layer
from .record.counters import EXCEEDED


class SlotsExceeded(RuntimeError):
    """More active experts than a layer has slots, in a step that `fits_slots` promised to fit: the server stops."""


class PagedLayers:
    """All MoE layers of a model, for its stage."""

    def __init__(self, layers: Sequence[Layer], device: str) -> None:
        self.layers = layers
        self.residents = Residents([layer.paging for layer in layers], device)
        self._indices = {id(layer.paging): layer.index for layer in layers}

    def fits_slots(self, method: Any, model_forward: ModelForward) -> bool:
        """Return whether the experts that upstream's method was just handed surely fit its slots."""
        index = self._indices[id(method)]
        return model_forward.selections[index] is not None and model_forward.assignments[index].fits

    def check(self, totals: torch.Tensor) -> None:
        """Raise `SlotsExceeded` if `totals` has such a step of a layer. Wait for the device."""
        exceeded = zip(totals[:, EXCEEDED].tolist(), self.layers, strict=True)
        layers = [layer.layer_id for count, layer in exceeded if count]
        if layers:
            raise SlotsExceeded(f"more than {self.residents.slots} experts were active in MoE layers {layers}")
