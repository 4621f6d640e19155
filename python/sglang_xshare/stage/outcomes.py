"""Whether the policy in force acted on a forward of the model runner: for the counters, and for response metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..policies.spelling import spell_policy
from .evidence.figures import hash_plan
from .evidence.metadata import Forward
from .gather import Ranks
from .graphs import Graphs
from .layer import Layer
from .plans import REASONS, Plans
from .step import StepKey, read_key

LONGEST = 100
"""Characters of a policy in a response; a front of `xshare` with all its keys takes 60."""


class Outcomes:
    """The outcome of each forward: of an eager one as counted; of a replay, not seen, by the plans in force."""

    def __init__(self, layers: Sequence[Layer], graphs: Graphs) -> None:
        self.outcome: str | None = None
        """Of the last forward of the model; None since a runner's began that has not come to the model."""
        self._layers, self._graphs = layers, graphs

    def adopt(self, plans: Plans, plan: Mapping[str, Any] | None) -> None:
        """These plans are in force from the next forward on, described as `plan`; None where no policy ever was. One
        with a long spelling, such as a tuned one, is named by its hash, since every response carries it.
        """
        self._plans = plans
        self._spelling: str | None = None
        if plan is not None:
            given = plans.given
            spelling = spell_policy(given.pop("policy"), given)
            self._spelling = spelling if len(spelling) <= LONGEST else f"{plan['policy']}, plan {hash_plan(plan)}"

    def begin(self, reasons: set[str | None]) -> str:
        """The outcome of an eager forward: `reasons` why layers have no plan, None if one has; empty in a prefill."""
        if not reasons:
            self.outcome = "prefill"
        elif None in reasons:
            self.outcome = "observed" if self._plans.schedule and self._plans.schedule.observed else "policy"
        else:
            self.outcome = next(reason for reason in REASONS if reason in reasons)
        return self.outcome

    def describe(self, forward_batch: Any, ranks: Ranks | None) -> Forward | None:
        """The forward that was just launched, for its requests; None where no policy was ever in force."""
        if self._spelling is None:
            return None
        if self.outcome is None:
            key = read_key(forward_batch, ranks)
            return Forward(self._spelling, key is not None, key is not None and self._selects(key))
        acts = self.outcome == "policy" and self._plans.schedule is not None
        return Forward(self._spelling, self.outcome != "prefill", acts)

    def _selects(self, key: StepKey) -> bool:
        """Whether some layer selects by the policy in the replay of a graph for this step."""
        schedule = self._plans.schedule
        if schedule is None or schedule.observed:
            return False
        return self._plans.act(self._layers, self._graphs.find_key(key))
