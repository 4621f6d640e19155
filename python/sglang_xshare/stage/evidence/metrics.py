"""What a policy does, counted on the device and read once a log interval; its part of the decode log line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...selection.cpu_call import is_readable, load
from ...types import Selection, Tally
from ..step import Step
from . import compiled
from .columns import COLUMNS, COUNTS, KEPT, PAGING_COUNTS, STEPS, allocate_tables, mark

if TYPE_CHECKING:
    from ...upstream.paging import Residents

# "policy", "observed" under `observe`, or why a forward of the target model stayed vanilla.
OUTCOMES = (
    "policy",
    "observed",
    "prefill",
    "phase",
    "min_tokens",
    "max_tokens",
    "override",
    "unchanged",
    "no_context",
    "vanilla",
)


@dataclass(frozen=True)
class Interval:
    """What happened since the last report. Totals over layers and steps; `outcomes` counts forwards."""

    layer_steps: int
    experts_before: int
    experts_after: int
    kept_mass: float
    rows: int
    rescued: int
    outcomes: dict[str, int]
    exact_rows: int = 0
    page_ins_before: int | None = None
    """What vanilla routing would have paged in, each time from the experts that were loaded; None without paging."""
    page_ins: int | None = None
    exceeded: int = 0
    """Layers' steps in which more experts were active than slots, where that had been ruled out."""

    @property
    def mean_before(self) -> float:
        """Mean active experts a layer and step under vanilla routing."""
        return self.experts_before / max(self.layer_steps, 1)

    @property
    def mean_after(self) -> float:
        """Mean active experts a layer and step."""
        return self.experts_after / max(self.layer_steps, 1)

    @property
    def mean_page_ins_before(self) -> float | None:
        """Mean experts a layer and step that vanilla routing would have paged in; None without paging."""
        return None if self.page_ins_before is None else self.page_ins_before / max(self.layer_steps, 1)

    @property
    def mean_page_ins(self) -> float | None:
        """Mean experts paged in a layer and step; None without paging."""
        return None if self.page_ins is None else self.page_ins / max(self.layer_steps, 1)

    @property
    def mean_kept_mass(self) -> float:
        """Kept mass of a live row (`Selection.kept_mass`), averaged over rows, layers and steps."""
        return self.kept_mass / max(self.rows, 1)

    @property
    def others_kept_mass(self) -> float | None:
        """The same of rows that are not exact, for an exact one keeps all; None where all are."""
        others = self.rows - self.exact_rows
        return (self.kept_mass - self.exact_rows) / others if others else None


class Counters:
    """Running totals on the device. The host waits for nothing, so that a captured graph counts on replay. A step
    without a live row, as when a graph is captured, counts as none.

    A step is counted in one launch on a GPU, in one call on a CPU, of what its selections have left in tables: see
    `tally`. Elsewhere it takes a dozen small operations. `residents` are those of a server that pages experts.
    """

    def __init__(self, num_layers: int, device: str, residents: Residents | None = None) -> None:
        # float64 counts exactly up to 2**53.
        self.totals = torch.zeros(num_layers, len(COLUMNS), dtype=torch.float64, device=device)
        self.residents = residents
        self.outcomes = torch.zeros(len(OUTCOMES), dtype=torch.int64, device=device)
        self.in_one_launch = self.totals.is_cuda
        self._in_one_call = is_readable(self.totals) and load() is not None
        self._tables: Tally | None = None
        self._by_shape: dict[torch.Size, tuple[Tally, list[Tally]]] = {}

    def count_outcome(self, outcome: str, step: Step | None = None) -> None:
        """Count one forward. On a GPU a step under policy is counted with its selections."""
        self._tables = None
        valid = None if step is None else step.batch.valid
        rows = 1 if step is None else step.rows
        if not (self.in_one_launch or self._in_one_call):
            self.outcomes[OUTCOMES.index(outcome)] += 1 if valid is None else valid.any()
        elif not self.in_one_launch or outcome != "policy":
            self._count_step(self.outcomes, OUTCOMES.index(outcome), rows, valid, self.totals)

    @property
    def _count_step(self) -> Callable[..., torch.Tensor]:
        """What counts a step in one launch, or in one call."""
        if not self.in_one_launch:
            return compiled.count_step
        from .counting import count_step

        return count_step

    def tally(self, layer: int, logits: torch.Tensor) -> Tally | None:
        """Where a layer's selection from logits [n, N] is to leave what is counted; None where it is not to. Raises
        RuntimeError where layers have different numbers of experts.
        """
        if not (self.in_one_launch or self._in_one_call) or not len(logits):
            return None
        if self._tables is not None and self._tables.active.shape[1] != logits.shape[1]:
            experts = f"{logits.shape[1]} experts in one MoE layer, {self._tables.active.shape[1]} in another"
            raise RuntimeError(f"{experts}: an expert policy counts layers of as many each")
        if self.in_one_launch:  # of its own: a captured graph writes to those of its capture
            self._tables = self._tables or allocate_tables(len(self.totals), logits)
            return self._tables.of(layer)
        if logits.shape not in self._by_shape:
            tables = allocate_tables(len(self.totals), logits)
            self._by_shape[logits.shape] = tables, [tables.of(number) for number in range(len(self.totals))]
        self._tables, by_layer = self._by_shape[logits.shape]
        return by_layer[layer]

    def count(self, selections: Sequence[Selection | None], step: Step, fits: Sequence[bool] = ()) -> torch.Tensor:
        """Count one step under policy, as `count_selections` does, and add it to the totals."""
        if self._tables is not None:
            return self._count_step(
                self.outcomes,
                OUTCOMES.index("policy") if self.in_one_launch else None,
                step.rows,
                step.batch.valid,
                self.totals,
                tables=self._tables,
                selecting=tuple(selection is not None for selection in selections),
                residents=self.residents,
                fits=tuple(fits),
                exact=step.batch.exact,
            )
        counts = count_selections(selections, step, self.residents, fits)
        self.totals += counts
        if self.in_one_launch:
            self.outcomes[OUTCOMES.index("policy")] += counts[:, STEPS].any()
        return counts


def count_selections(
    selections: Sequence[Selection | None],
    step: Step,
    residents: Residents | None = None,
    fits: Sequence[bool] = (),
) -> torch.Tensor:
    """Count one step: every layer's selection, None where it stayed vanilla, at least one other. `fits` says of every
    layer with paged experts, of which `residents` were loaded, whether what is active was sure to fit its slots.

    Returns [layers, COLUMNS] float64, all zero for a layer that stayed vanilla.
    """
    selecting = [number for number, selection in enumerate(selections) if selection is not None]
    found = [selection for selection in selections if selection is not None]
    vanilla = torch.stack([selection.vanilla_active for selection in found])
    active = torch.stack([selection.active for selection in found])
    before, after = vanilla.sum(1), active.sum(1)
    kept = torch.stack([selection.kept_mass for selection in found]).sum(1, dtype=torch.float64)
    rescued = torch.stack([selection.rescued for selection in found])
    valid, marked = step.batch.valid, step.batch.exact
    rows = torch.full_like(before, step.rows) if valid is None else valid.sum().expand_as(before)
    if marked is None:
        exact = torch.zeros_like(before)
    else:
        exact = (marked if valid is None else marked & valid).sum().expand_as(before)
    paged_before = paged = exceeded = torch.zeros_like(before)
    if residents is not None:
        loaded = torch.stack([residents.loaded[number] for number in selecting])
        paged_before, paged = (vanilla & ~loaded).sum(1), (active & ~loaded).sum(1)
        if fits:
            sure = mark(tuple(fits[number] for number in selecting), after.device)
            exceeded = sure & (after > residents.slots)
    counts = torch.stack([rows > 0, before, after, kept, rows, rescued, exact, paged_before, paged, exceeded], 1)
    if len(found) < len(selections):
        nothing, counted = torch.zeros_like(counts[0]), iter(counts)
        counts = torch.stack([nothing if selection is None else next(counted) for selection in selections])
    return counts


class Reader:
    """Reads what was counted since its own last look: the log and the metrics have one each."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._totals = [[0.0] * counters.totals.shape[1] for _ in range(len(counters.totals))]
        self._outcomes = [0] * len(OUTCOMES)

    def read(self) -> Interval:
        """Look, and move on. Waits for the device."""
        interval, self._totals, self._outcomes = self._look()
        return interval

    def look(self) -> Interval:
        """What `read` would return, without moving on. Waits for the device."""
        return self._look()[0]

    def look_layers(self) -> list[list[float]]:
        """The same by layer, as the columns of `Counters.totals`. Waits for the device."""
        return self._subtract(self._counters.totals.tolist())

    def _subtract(self, totals: list[list[float]]) -> list[list[float]]:
        rows = zip(totals, self._totals, strict=True)
        return [[now - then for now, then in zip(row, former, strict=True)] for row, former in rows]

    def _look(self) -> tuple[Interval, list[list[float]], list[int]]:
        totals, outcomes = self._counters.totals.tolist(), self._counters.outcomes.tolist()
        new = [sum(column) for column in zip(*self._subtract(totals), strict=True)]
        counts = {name: now - then for name, now, then in zip(OUTCOMES, outcomes, self._outcomes, strict=True)}
        columns = COUNTS if self._counters.residents is None else COUNTS | PAGING_COUNTS
        found = {name: int(new[column]) for name, column in columns.items()}
        return Interval(**found, kept_mass=new[KEPT], outcomes=counts), totals, outcomes


def format_log(interval: Interval) -> str:
    """The stage's part of the decode log line."""
    selecting = {name: count for name, count in interval.outcomes.items() if count and name in ("policy", "observed")}
    vanilla = [f"{name} {count}" for name, count in interval.outcomes.items() if count and name not in selecting]
    steps = ", ".join(f"{name} steps: {count}" for name, count in (selecting or {"policy": 0}).items())
    text = f", {steps}, vanilla steps: {' '.join(vanilla) or 0}"
    if "observed" in selecting:
        experts = f"active experts: {interval.mean_before:.1f}"
        if interval.mean_page_ins_before is not None:
            experts += f", page-ins: {interval.mean_page_ins_before:.1f}"
        text = f", {experts}, batch size: {interval.rows / max(interval.layer_steps, 1):.1f}{text}"
    elif interval.layer_steps:
        experts = f"active experts: {interval.mean_before:.1f} -> {interval.mean_after:.1f}"
        if interval.mean_page_ins is not None:
            experts += f", page-ins: {interval.mean_page_ins_before:.1f} -> {interval.mean_page_ins:.1f}"
        text = f", {experts}, kept mass: {interval.mean_kept_mass:.4f}{text}"
    if interval.exact_rows:
        text += f", exact rows: {interval.exact_rows / interval.rows:.1%}"
        mass = interval.others_kept_mass
        text += "" if mass is None else f", kept mass of the others: {mass:.4f}"
    return text + (f", rescued: {interval.rescued}" if interval.rescued else "")
