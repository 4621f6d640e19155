"""Experts that SGLang pages into slots of GPU memory, with `--enable-paged-experts` (from 0.5.23 on)."""

from collections.abc import Sequence
from typing import Any

import torch


def find_paging(experts: Any) -> Any:
    """Return the `PagedExpertsMoEMethod` of a `FusedMoE`, or None if all of its experts stay loaded.

    A method without a number of slots also pages. SGLang sets the number later, from the memory that is left.
    """
    method = getattr(experts, "quant_method", None)
    if method is None or not hasattr(method, "num_resident"):
        return None
    return method if count_slots(method) < method.num_experts else None


def count_slots(method: Any) -> int:
    """Return how many experts of a layer can be loaded at once, or 0 if SGLang has not set the number yet."""
    slots: int | None = method.num_resident
    return slots or 0


class Residents:
    """The loaded experts of a model's layers.

    `methods` contains the result of `find_paging` for each layer. `loaded` [layers, N] bool on the device marks the
    experts that were loaded at the last `read`. If SGLang decides on the device which experts to load, `read` reads its
    state there. In a captured graph, each replay reads the state again.
    """

    def __init__(self, methods: Sequence[Any], device: str) -> None:
        self.methods = methods
        self.loaded = torch.zeros(len(methods), methods[0].num_experts, dtype=torch.bool, device=device)
        self._slots: torch.Tensor | None = None
        states = [method.device_executor.residency for method in methods if method.device_executor is not None]
        if states:
            # [layers, N] int32, -1 if not loaded. SGLang's tensors become rows of this one, so one launch reads all.
            self._slots = torch.stack([state.expert_slot for state in states])
            for state, row in zip(states, self._slots, strict=True):
                state.expert_slot = row

    @property
    def slots(self) -> int:
        """The number of experts of a layer that can be loaded at once; see `count_slots`."""
        return count_slots(self.methods[0])

    def read(self) -> None:
        """Update `loaded` for all layers. One call in a step suffices: a layer loads experts only when it runs."""
        if self._slots is not None:
            torch.ge(self._slots, 0, out=self.loaded)
            return
        numbers = [[layer, expert] for layer, method in enumerate(self.methods) for expert in method.policy.resident]
        self.loaded.zero_()
        places = torch.tensor(numbers, dtype=torch.long, device=self.loaded.device).view(-1, 2)
        self.loaded[tuple(places.T)] = True
