"""What a forward of the model runner was to its requests: whether the policy in force acted on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..policies.spelling import spell_policy
from .evidence.figures import hash_plan
from .evidence.told import Mark
from .gather import Ranks
from .graphs import Graphs
from .layer import Layer
from .plans import REASONS, Plans
from .step import Size, read_size

LONGEST = 100
"""Characters of a policy in an answer; a front of `xshare` with all its keys takes 60."""


class Marks:
    """Marks the forwards of one model: by what the stage has counted them as, or, where a graph is replayed past it, by
    the plans in force for as many rows.
    """

    def __init__(self, layers: Sequence[Layer], graphs: Graphs) -> None:
        self.outcome: str | None = None
        """What the last forward of the model was counted as; None since a runner's began that has not come to it."""
        self._layers, self._graphs = layers, graphs

    def adopt(self, plans: Plans, plan: Mapping[str, Any] | None) -> None:
        """These plans are in force from the next forward on, described as `plan`; None where no policy ever was. One
        that is long to spell, such as a tuned one, is named by its hash, since every answer carries it.
        """
        self._plans = plans
        self._spelling: str | None = None
        if plan is not None:
            given = plans.given
            spelling = spell_policy(given.pop("policy"), given)
            self._spelling = spelling if len(spelling) <= LONGEST else f"{plan['policy']}, plan {hash_plan(plan)}"

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
