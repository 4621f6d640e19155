"""The trace: a file with one JSON line for each MoE layer in each step.

It contains enough to draw Figure 1 of the OEA paper.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from ...policies.common import PHASES
from ..step import Step
from .counters import AFTER, BEFORE, COLUMNS, EXACT, KEPT, PAGED, PAGED_BEFORE, ROWS, STEPS

logger = logging.getLogger(__name__)
PHASE = len(COLUMNS)
"""The column of the phase, after the columns of the counts. It is followed by three columns for each observed plan:
active experts, kept mass and page-ins.
"""
CAPACITY = 4096
"""The maximum number of steps that the ring buffer keeps between two calls of `write`."""


class Trace:
    """A ring buffer of steps on the device. `record` does not synchronize, and `write` appends the steps to a file."""

    def __init__(self, path: Path, layer_ids: Sequence[int], device: str, pages: bool = False) -> None:
        self.device = device
        self.pages = pages
        self.file = path.open("ab")
        if self.file.tell():
            logger.warning("%s: not empty; this run's steps are appended, numbered from 0 again", path)
        self.layer_ids = layer_ids
        self._switch: dict[str, Any] = {}
        self._plan: dict[str, Any] = {}
        self.observed: list[str | None] = []
        """The names of the observed plans. They are the same for all steps in the ring buffer, because a switch first
        writes the earlier steps to the file.
        """
        self.ring = self._make_ring()
        self.recorded = torch.zeros(1, dtype=torch.int64, device=device)
        self.written = 0

    def _make_ring(self) -> torch.Tensor:
        width = PHASE + 1 + 3 * len(self.observed)
        # One slot more than `CAPACITY`: a step without a live row must not overwrite a step that `write` still needs.
        return torch.zeros(CAPACITY + 1, len(self.layer_ids), width, dtype=torch.float64, device=self.device)

    def switch(self, number: int, plan: Mapping[str, Any]) -> None:
        """Add the number of a switch to all later records. The first of these records also gets the new plan.

        Call `write` before this method, because a record gets the number when it is written.
        """
        self._switch, self._plan = {"switch": number}, {"plan": plan}

    def record(
        self, counts: torch.Tensor, step: Step, observed: Mapping[str | None, torch.Tensor] | None = None
    ) -> None:
        """Record the counts of one step in the ring buffer.

        `counts` [layers, 10] is the result of `Counters.count`. `observed` maps each observed plan's name to its
        counts.
        """
        observed = observed or {}
        if list(observed) != self.observed:
            former, self.observed = self.observed, list(observed)
            if len(former) != len(observed):  # otherwise keep the ring, because captured graphs write to its address
                self.ring = self._make_ring()
        phase = torch.full_like(counts[:, :1], PHASES.index(step.phase))
        others = [plan[:, column : column + 1] for plan in observed.values() for column in (AFTER, KEPT, PAGED)]
        self.ring.index_copy_(0, self.recorded % len(self.ring), torch.cat([counts, phase, *others], 1)[None])
        self.recorded += counts[:, STEPS].any()  # the next step overwrites a step without a live row

    def write(self) -> None:
        """Wait for the device, and append a line for every layer and step since the last call.

        A line contains these values:
        - the step, its phase, the layer id and the number of live rows,
        - the active experts under vanilla routing and under the policy, and the mean kept mass of the rows,
        - the number of exact rows if there are any, and the page-ins if experts are paged,
        - the active experts, kept mass and page-ins of each observed plan,
        - the fields that `switch` adds.

        Raises OSError if the file cannot be written. Steps are lost then, but no step is written twice.
        """
        recorded = int(self.recorded)
        first = max(self.written, recorded - CAPACITY)
        former, self.written = self.written, recorded
        if first > former:
            logger.warning("%s: %d steps lost; lower --decode-log-interval", self.file.name, first - former)
        for number in range(first, recorded):
            for layer, row in zip(self.layer_ids, self.ring[number % len(self.ring)].tolist(), strict=True):
                if row[STEPS]:
                    record = self._describe(number, layer, row) | self._switch | self._plan
                    self.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
                    self._plan = {}
        self.file.flush()

    def _describe(self, step: int, layer: int, row: list[float]) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": step,
            "phase": PHASES[int(row[PHASE])],
            "layer": layer,
            "batch_size": int(row[ROWS]),
            "experts_before": int(row[BEFORE]),
            "experts_after": int(row[AFTER]),
            "kept_mass": row[KEPT] / row[ROWS],
        }
        if row[EXACT]:
            record["exact_rows"] = int(row[EXACT])
        if self.pages:
            record |= {"page_ins_before": int(row[PAGED_BEFORE]), "page_ins": int(row[PAGED])}
        if self.observed:
            found = zip(self.observed, *(row[PHASE + 1 + place :: 3] for place in range(3)), strict=True)
            record["plans"] = {
                name: {"experts_after": int(after), "kept_mass": kept / row[ROWS]}
                | ({"page_ins": int(paged)} if self.pages else {})
                for name, after, kept, paged in found
            }
        return record
