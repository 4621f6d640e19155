"""The layers of a model whose experts are paged into slots: what each has loaded, and what is sure to fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..upstream.paging import Residents
from .frame import Running
from .layer import Layer
from .record.counters import EXCEEDED
from .step import Step


class SlotsExceeded(RuntimeError):
    """More experts were active than a layer has slots, though SGLang was told otherwise: the server stops."""


class PagedLayers:
    """All MoE layers of a model, for its stage."""

    def __init__(self, layers: Sequence[Layer], device: str) -> None:
        self.layers = layers
        self.residents = Residents([layer.paging for layer in layers], device)
        self._numbers = {id(layer.paging): layer.number for layer in layers}

    def divide(self, step: Step) -> list[Step]:
        """The step as each layer sees it, with the experts that are loaded. Launched once for all."""
        self.residents.read()
        slots = self.residents.slots or None
        batches = (replace(step.batch, resident=loaded, slots=slots) for loaded in self.residents.loaded)
        return [replace(step, batch=batch) for batch in batches]

    def fits(self, method: Any, running: Running) -> bool:
        """Return whether the experts that upstream's method was just handed surely fit its slots."""
        number = self._numbers[id(method)]
        return running.selections[number] is not None and running.assignments[number].fits

    def check(self, totals: torch.Tensor) -> None:
        """Raise `SlotsExceeded` where a layer has counted it in `totals`. Waits for the device."""
        exceeded = zip(totals[:, EXCEEDED].tolist(), self.layers, strict=True)
        layers = [layer.layer_id for count, layer in exceeded if count]
        if layers:
            raise SlotsExceeded(f"more than {self.residents.slots} experts were active in MoE layers {layers}")
