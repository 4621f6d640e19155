"""What a forward of the model runner was to its requests: whether the policy in force acted on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..policies.spelling import spell_policy
from .evidence.told import Mark
from .gather import Ranks
from .graphs import Graphs
from .layer import Layer
from .plans import REASONS, Plans
from .step import Size, read_size


class Marks:
    """Marks the forwards of one model: by what the stage has counted them as, or, where a graph is replayed past it, by
    the plans in force for as many rows.
    """

    def __init__(self, layers: Sequence[Layer], graphs: Graphs) -> None:
        self.outcome: str | None = None
        """What the last forward of the model was counted as; None since a runner's began that has not come to it."""
        self._layers, self._graphs = layers, graphs

    def adopt(self, plans: Plans, is_policy: bool) -> None:
        """These plans are in force from the next forward on; no `is_policy` where no policy ever was."""
        self._plans = plans
        given = plans.given
        self._spelling = spell_policy(given.pop("policy"), given) if is_policy else None

    def settle(self, reasons: set[str | None]) -> str:
        """What the forward that begins is counted as: `reasons` are why layers have no plan, None that some have one;
        empty in a prefill.
        """
        if not reasons:
            self.outcome = "prefill"
        elif None in reasons:
            self.outcome = "observed" if self._plans.schedule and self._plans.schedule.observed else "policy"
        else:
            self.outcome = next(reason for reason in REASONS if reason in reasons)
        return self.outcome

    def mark(self, forward_batch: Any, ranks: Ranks | None) -> Mark | None:
        """The forward that was just launched; None where no policy was ever in force."""
        if self._spelling is None:
            return None
        if self.outcome is None:
            size = read_size(forward_batch, ranks)
            return Mark(self._spelling, size is not None, size is not None and self._selects(size))
        acts = self.outcome == "policy" and self._plans.schedule is not None
        return Mark(self._spelling, self.outcome != "prefill", acts)

    def _selects(self, size: Size) -> bool:
        """Whether some layer selects by the policy in the replay of a graph for this step."""
        schedule = self._plans.schedule
        if schedule is None or schedule.observed:
            return False
        return self._plans.act(self._layers, self._graphs.find_size(size))
