"""What a loaded MoE layer runs its experts with: `auto`, or what a layer falls back to, is only known then."""

from __future__ import annotations

from typing import Any

from ..upstream import find_runner
from .modes import RUNNERS


def check_runner(layer: Any, device: str) -> None:
    """Raise ValueError where a layer, an upstream `FusedMoE`, runs what does not take a policy's slots.

    A filled slot repeats an expert of weight 0. What SGLang's CPU loop and AMX kernels make of it, served tests show.
    """
    runner = find_runner(layer)
    if device == "cpu" or runner in RUNNERS:
        return
    found = f"MoE runner {runner}" if runner else f"a kernel of {type(layer.quant_method).__name__}"
    raise ValueError(
        f"{found}, which is not known to take one expert twice in a row's slots; allowed is "
        f"--moe-runner-backend {', '.join(RUNNERS)} where this quantization has one of them"
    )
