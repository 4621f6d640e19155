"""Experts that SGLang pages into slots of GPU memory (`--enable-paged-experts`, from 0.5.23 on), and those loaded."""

from collections.abc import Sequence
from typing import Any

import torch


def find_paging(experts: Any) -> Any:
    """Return upstream's `PagedExpertsMoEMethod` of a `FusedMoE`; None if all of its experts stay loaded.

    A method without a number of slots pages too: SGLang sets the number later, by the memory that is left.
    """
    method = getattr(experts, "quant_method", None)
    if method is None or not hasattr(method, "num_resident"):
        return None
    return method if count_slots(method) < method.num_experts else None


def count_slots(method: Any) -> int:
    """Return how many experts of a layer can be loaded at once; 0 until SGLang has set that number."""
    slots: int | None = method.num_resident
    return slots or 0


class Residents:
    """The loaded experts of a model's layers: `loaded` [layers, N] bool on the device, as of the last `read`.

    `methods` has the result of `find_paging` for each layer. If SGLang's paging decides on the device, `read` reads
    the state of the paging there, in a captured graph at every replay.
    """

    def __init__(self, methods: Sequence[Any], device: str) -> None:
        self.methods = methods
        self.loaded = torch.zeros(len(methods), methods[0].num_experts, dtype=torch.bool, device=device)
        self._slots: torch.Tensor | None = None
        states = [method.device_executor.residency for method in methods if method.device_executor is not None]
        if states:
            # [layers, N] int32, -1 if not loaded. SGLang's tensors become its rows, so one launch reads all.
            self._slots = torch.stack([state.expert_slot for state in states])
            for state, row in zip(states, self._slots, strict=True):
                state.expert_slot = row

    @property
    def slots(self) -> int:
        """The number of experts of a layer that can be loaded at once; see `count_slots`."""
        return count_slots(self.methods[0])

    def read(self) -> None:
        """Update `loaded`, once for all layers of a step: a layer's experts change only when the layer runs."""
        if self._slots is not None:
            torch.ge(self._slots, 0, out=self.loaded)
            return
        numbers = [[layer, expert] for layer, method in enumerate(self.methods) for expert in method.policy.resident]
        self.loaded.zero_()
        self.loaded[tuple(torch.tensor(numbers, device=self.loaded.device).T)] = True
