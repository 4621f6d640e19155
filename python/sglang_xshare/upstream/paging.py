"""Experts that SGLang pages into slots (`--enable-paged-experts`, from 0.5.23 on): which of a layer's are loaded."""

from collections.abc import Sequence
from typing import Any

import torch


def find_paging(experts: Any) -> Any:
    """Upstream's `PagedExpertsMoEMethod` of a `FusedMoE`; None where all of its experts stay loaded."""
    method = getattr(experts, "quant_method", None)
    if method is None or not hasattr(method, "num_resident"):
        return None
    return method if method.num_resident < method.num_experts else None


class Residents:
    """Which experts of a model's layers are loaded: `loaded` [layers, N] bool on the device, as `read` found them last.
    `methods` are what `find_paging` returned of each layer.

    SGLang's state is read, on the device where SGLang decides there: a captured graph reads it anew at every replay.
    """

    def __init__(self, methods: Sequence[Any], device: str) -> None:
        self.methods = methods
        self.slots: int = methods[0].num_resident
        self.loaded = torch.zeros(len(methods), methods[0].num_experts, dtype=torch.bool, device=device)
        self._slots: torch.Tensor | None = None
        states = [method.device_executor.residency for method in methods if method.device_executor is not None]
        if states:
            # [layers, N] int32, -1 where not loaded. SGLang's own tensors become its rows: one launch reads all layers.
            self._slots = torch.stack([state.expert_slot for state in states])
            for state, row in zip(states, self._slots, strict=True):
                state.expert_slot = row

    def read(self) -> None:
        """Look. A layer's experts come and go only when it runs them, so that this serves all layers of a step."""
        if self._slots is not None:
            torch.ge(self._slots, 0, out=self.loaded)
            return
        numbers = [[layer, expert] for layer, method in enumerate(self.methods) for expert in method.policy.resident]
        self.loaded.zero_()
        self.loaded[tuple(torch.tensor(numbers, device=self.loaded.device).T)] = True
