"""Counters of a policy. The device counts in every step, and the host reads the counts once in each log interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import torch

from ...selection.cpu_call import count_step, is_readable, load
from ...types import Tally, allocate_tally
from ...upstream.paging import Residents
from ..placement import Balance
from ..step import Step
from .interval import OUTCOMES, Interval

COLUMNS = STEPS, BEFORE, AFTER, KEPT, ROWS, RESCUED, EXACT, PAGED_BEFORE, PAGED, EXCEEDED = range(10)
"""The columns of a layer's counts. The last three counts stay 0 on a server without paged experts."""
COUNTS = {"layer_steps": STEPS, "experts_before": BEFORE, "experts_after": AFTER, "rows": ROWS}
COUNTS |= {"rescued": RESCUED, "exact_rows": EXACT}
"""The fields of `Interval` that every server counts, each with its column."""
PAGING_COUNTS = {"page_ins_before": PAGED_BEFORE, "page_ins": PAGED}
"""The fields that a server counts only with paged experts, each with its column."""
RANK_COUNTS = {"fullest_before": len(COLUMNS), "fullest_after": len(COLUMNS) + 1}
"""The fields that a server counts only with expert-parallel ranks, each with its column. `Balance` counts them."""
MAX_SHAPES = 64
"""The maximum number of tallies that are kept for reuse, one for each shape of the logits. A tally of 48 layers, 128
experts and 512 rows takes 0.1 MB.
"""


@cache
def copy_flags(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """Return the flags as a bool tensor [layers] on the device.

    The first call copies the flags from the host, before any capture. Later calls return the same tensor.
    """
    return torch.tensor(flags).to(device)


class Counters:
    """The running totals of a policy's counts.

    The device counts selections. So a captured CUDA graph also contains the counting, and each replay repeats it. The
    host counts the outcomes of forwards. A step without a live row, such as the step of a capture, is not counted.

    Each layer writes its counts to a `StepTally`. At the end of a step, a dozen small operations add the tally to the
    totals. On a CPU, one compiled call does this. `residents` is None without paged experts. `balance` is None without
    expert-parallel ranks.
    """

    def __init__(
        self, num_layers: int, device: str, residents: Residents | None = None, balance: Balance | None = None
    ) -> None:
        # float64 counts exactly up to 2**53.
        self.totals = torch.zeros(num_layers, len(COLUMNS), dtype=torch.float64, device=device)
        self.residents, self.balance = residents, balance
        self.names = COUNTS | (PAGING_COUNTS if residents else {}) | (RANK_COUNTS if balance else {})
        """The fields of `Interval` that this server counts, each with its column in the result of `read`."""
        self.outcomes: Counter[str] = Counter()
        """The number of model runner forwards for each outcome. `Stage.end_forward` counts them on the host."""
        self.in_one_call = is_readable(self.totals) and load() is not None
        # On a CPU the next step of the same shape reuses the tally, because nothing reads a tally after its step is
        # counted.
        self._by_shape: dict[torch.Size, tuple[Tally, list[Tally]]] = {}

    def make_alike(self) -> Counters:
        """Return new counters for the same layers, but without `balance`."""
        return Counters(len(self.totals), str(self.totals.device), self.residents)

    def read(self) -> tuple[torch.Tensor, Counter[str]]:
        """Wait for the device, and return (totals [layers, columns], outcomes) on the host."""
        totals = self.totals if self.balance is None else torch.cat([self.totals, self.balance.totals], 1)
        return totals.to("cpu", copy=True), self.outcomes.copy()

    def allocate(self, logits: torch.Tensor) -> tuple[Tally, list[Tally] | None]:
        """Return an empty tally for a step with `logits` [n, N], and a list with each layer's part of the tally.

        The tally's tensors have the shape [layers, ...]. The list is None unless later steps reuse the tally. `active`
        and `vanilla_active` are 0 at first, because nonzero entries mark the layers that have selected experts.
        """
        layers = len(self.totals)
        if not (self.in_one_call and is_readable(logits)):
            return allocate_tally(logits.new_zeros, *logits.shape, layers), None
        if logits.shape not in self._by_shape:
            if len(self._by_shape) >= MAX_SHAPES:
                self._by_shape.clear()
            with torch.inference_mode(False):  # a later step cannot write to a tensor made in inference mode
                tally = allocate_tally(logits.new_zeros, *logits.shape, layers)
                self._by_shape[logits.shape] = tally, [tally.of(layer) for layer in range(layers)]
        tally, by_layer = self._by_shape[logits.shape]
        tally.active.zero_()
        tally.vanilla_active.zero_()
        return tally, by_layer

    def count(self, step: Step, counted: StepTally, fits: Sequence[bool] = ()) -> torch.Tensor:
        """Add the tally of a step to the totals. Return the added counts, [layers, COLUMNS] float64.

        The counts are 0 for a layer that stayed vanilla, and for a step without a live row. With paged experts, `fits`
        contains one bool for each layer. It is True if the layer cannot have more active experts than page slots.
        """
        tally = counted.layers
        if tally is None:
            return torch.zeros_like(self.totals)
        if self.in_one_call and is_readable(tally.active):
            paged = self.residents
            sure = copy_flags(tuple(fits), self.totals.device) if fits and paged is not None else None
            loaded, slots = (None, 0) if paged is None else (paged.loaded, paged.slots)
            return count_step(self.totals, tally, step.batch, step.rows, loaded, slots, sure)
        counts = count_tally(tally, step, self.residents, fits)
        self.totals += counts
        return counts


class StepTally:
    """The counts that the MoE layers write in one step.

    `layers` is one tally of all layers, whose tensors have the shape [layers, ...]. It is None until the first layer
    selects experts.
    """

    def __init__(self, counters: Counters) -> None:
        self.layers: Tally | None = None
        self._counters = counters
        self._by_layer: list[Tally] | None = None

    def of(self, layer: int, logits: torch.Tensor) -> Tally | None:
        """Return the tally of one layer for `logits` [n, N], or None if `logits` has no rows.

        Raises RuntimeError if an earlier layer had another number of experts.
        """
        rows, experts = logits.shape
        if not rows:
            return None
        if self.layers is None:
            self.layers, self._by_layer = self._counters.allocate(logits)
        if self.layers.active.shape[1] != experts:
            counts = f"{experts} experts in one MoE layer, {self.layers.active.shape[1]} in another"
            raise RuntimeError(f"{counts}: an expert policy needs the same number in each layer")
        return self.layers.of(layer) if self._by_layer is None else self._by_layer[layer]


def count_tally(
    tally: Tally, step: Step, residents: Residents | None = None, fits: Sequence[bool] = ()
) -> torch.Tensor:
    """Return the counts that `Counters.count` adds to the totals, [layers, COLUMNS] float64."""
    before, after = tally.vanilla_active.sum(1), tally.active.sum(1)
    kept = tally.kept_mass.sum(1, dtype=torch.float64)
    valid, marked = step.batch.valid, step.batch.exact
    rows = torch.full_like(before, step.rows) if valid is None else valid.sum().expand_as(before)
    exact = torch.zeros_like(before)
    if marked is not None:
        exact = (marked if valid is None else marked & valid).sum().expand_as(before)
    paged_before = paged = exceeded = torch.zeros_like(before)
    if residents is not None:
        missing = ~residents.loaded
        paged_before, paged = (tally.vanilla_active & missing).sum(1), (tally.active & missing).sum(1)
        if fits:
            exceeded = copy_flags(tuple(fits), after.device) & (after > residents.slots)
    # A layer that has selected experts for a live row has experts in `vanilla_active`. All other layers have none.
    selects = before > 0
    counts = [selects, before, after, kept, rows, tally.rescued, exact, paged_before, paged, exceeded]
    return torch.stack(counts, 1) * selects[:, None]


class Reader:
    """A reader that returns the counts since its own last read. Each read waits for the device."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._former: tuple[torch.Tensor | int, Counter[str]] = 0, Counter()

    def read(self) -> Interval:
        """Return the counts since the last read."""
        now = self._counters.read()
        interval, self._former = self._subtract(*now)[0], now
        return interval

    def look(self) -> tuple[Interval, list[list[float]]]:
        """Return the counts that `read` would return, and the counts of each layer. Do not start a new interval.

        The counts of a layer have the columns of `Counters.read`.
        """
        return self._subtract(*self._counters.read())

    def _subtract(self, totals: torch.Tensor, outcomes: Counter[str]) -> tuple[Interval, list[list[float]]]:
        layers = totals - self._former[0]
        new = layers.sum(0).tolist()
        found = {name: int(new[column]) for name, column in self._counters.names.items()}
        counts = {outcome: outcomes[outcome] - self._former[1][outcome] for outcome in OUTCOMES}
        return Interval(**found, kept_mass=new[KEPT], outcomes=counts), layers.tolist()
