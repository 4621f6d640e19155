"""A record of every MoE layer and step, one JSON line each: what OEA's Figure 1 is drawn from."""

from __future__ import annotations

from pathlib import Path

import orjson

from ..types import Selection
from .step import Step


class Trace:
    """Appends to a file. Reads each selection at once, so it synchronizes: for measurement, not for production."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab")
        self.steps = 0

    def write(self, step: Step, selections: dict[int, Selection]) -> None:
        """Write one line a layer: step, phase, layer id, live rows, experts before and after, their mean kept mass."""
        valid = step.batch.valid
        rows = step.rows if valid is None else int(valid.sum())
        for layer, selection in selections.items():
            record = {
                "step": self.steps,
                "phase": step.phase,
                "layer": layer,
                "batch_size": rows,
                "experts_before": int(selection.vanilla_active.sum()),
                "experts_after": int(selection.active.sum()),
                "kept_mass": float(selection.kept_mass.sum()) / max(rows, 1),
            }
            self.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self.file.flush()
        self.steps += 1
