"""The MoE layers of a model with paged experts: which experts are loaded, and which steps fit the page slots."""

from collections.abc import Sequence
from typing import Any

import torch

from ..upstream.paging import Residents
from .frame import ModelForward
from .layer import Layer
from .record.counters import EXCEEDED


class SlotsExceeded(RuntimeError):
    """An error that stops the server: a step that `fits_slots` allowed had more active experts than page slots."""


class PagedLayers:
    """All MoE layers of a model with paged experts."""

    def __init__(self, layers: Sequence[Layer], device: str) -> None:
        self.layers = layers
        self.residents = Residents([layer.paging for layer in layers], device)
        self._indices = {id(layer.paging): layer.index for layer in layers}

    def fits_slots(self, method: Any, model_forward: ModelForward) -> bool:
        """Return whether a layer has selected experts by a plan that never activates more experts than page slots.

        `method` is SGLang's `PagedExpertsMoEMethod` of the layer.
        """
        index = self._indices[id(method)]
        return model_forward.selections[index] is not None and model_forward.assignments[index].fits

    def check(self, totals: torch.Tensor) -> None:
        """Raise `SlotsExceeded` if a step that `fits_slots` allowed had more active experts than page slots.

        `totals` are the totals of the acting lane's counters. The host waits for the device.
        """
        exceeded = zip(totals[:, EXCEEDED].tolist(), self.layers, strict=True)
        layers = [layer.layer_id for count, layer in exceeded if count]
        if layers:
            raise SlotsExceeded(f"more than {self.residents.slots} experts were active in MoE layers {layers}")
