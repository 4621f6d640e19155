"""A record of every MoE layer and step, one JSON line each: what OEA's Figure 1 is drawn from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from ..policies.schedule import PHASES
from .metrics import AFTER, BEFORE, KEPT, ROWS, STEPS
from .step import Step

logger = logging.getLogger(__name__)
PHASE = 6
"""The column after those of the counts; then two for every observed plan, experts after and kept mass."""
CAPACITY = 4096
"""Steps held between two log intervals."""


class Trace:
    """Records steps in a ring on the device, without synchronizing, and appends them to a file when told to."""

    def __init__(self, path: Path, layer_ids: Sequence[int], device: str, observed: Sequence[str] = ()) -> None:
        self.file = path.open("ab")
        if self.file.tell():
            logger.warning("%s: not empty; this run's steps are appended, numbered from 0 again", path)
        self.layer_ids = layer_ids
        self.observed = observed
        self.ring = torch.zeros(CAPACITY, len(layer_ids), 7 + 2 * len(observed), dtype=torch.float64, device=device)
        self.recorded = torch.zeros(1, dtype=torch.int64, device=device)
        self.written = 0

    def record(self, counts: torch.Tensor, step: Step, observed: Sequence[torch.Tensor] = ()) -> None:
        """Keep one step's counts, [layers, 6] as `count_selections` returns them, and those of each observed plan."""
        phase = torch.full_like(counts[:, :1], PHASES.index(step.phase))
        others = [plan[:, AFTER : KEPT + 1] for plan in observed]
        self.ring.index_copy_(0, self.recorded % CAPACITY, torch.cat([counts, phase, *others], 1)[None])
        self.recorded += counts[:, STEPS].any()  # a step without a live row is overwritten by the next

    def write(self) -> None:
        """Append a line for every layer and step since the last call: step, phase, layer id, live rows, experts before
        and after, their mean kept mass; the latter two also by observed plan. Waits for the device.
        """
        recorded = int(self.recorded)
        first = max(self.written, recorded - CAPACITY)
        if first > self.written:
            logger.warning("%s: %d steps lost; lower --decode-log-interval", self.file.name, first - self.written)
        for number in range(first, recorded):
            rows = zip(self.layer_ids, self.ring[number % CAPACITY].tolist(), strict=True)
            lines = (_format(number, layer, row, self.observed) for layer, row in rows if row[STEPS])
            self.file.write(b"".join(lines))
        self.file.flush()
        self.written = recorded


def _format(step: int, layer: int, row: list[float], observed: Sequence[str]) -> bytes:
    record: dict[str, Any] = {
        "step": step,
        "phase": PHASES[int(row[PHASE])],
        "layer": layer,
        "batch_size": int(row[ROWS]),
        "experts_before": int(row[BEFORE]),
        "experts_after": int(row[AFTER]),
        "kept_mass": row[KEPT] / row[ROWS],
    }
    if observed:
        pairs = zip(observed, row[PHASE + 1 :: 2], row[PHASE + 2 :: 2], strict=True)
        record["plans"] = {
            name: {"experts_after": int(after), "kept_mass": kept / row[ROWS]} for name, after, kept in pairs
        }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
