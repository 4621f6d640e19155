"""A switch to another policy between two steps: check the next value, make graphs follow, assign the value."""

import json
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.batches import Batches
from ..upstream.server import show_plan, wait_for_device
from .acceptance import Acceptance
from .evidence.agreement import Agreement
from .evidence.counters import Counters, Reader
from .evidence.trace import Trace
from .graphs import Graphs, describe_misfits
from .in_force import InForce
from .lane import Lane, make_lanes
from .layer import Layer
from .paged import PagedLayers
from .reports import Reports

logger = logging.getLogger(__name__)


class Switching:
    """The part of a stage that switches to another policy."""

    layers: Sequence[Layer]
    device: str
    counters: Counters
    in_force: InForce
    graphs: Graphs
    reports: Reports
    acceptance: Acceptance
    agreement: Agreement | None
    trace: Trace | None
    since_switch: Reader
    switches: int
    disagreement: str | None
    """How ranks selected differently since the last switch that a client asked for; None if they did not."""
    paged: PagedLayers | None
    _find_batches: Callable[[], Batches] | None
    _recapture: Callable[[Callable[[int], bool] | None], None] | None
    _has_read_batches = False
    report: Callable[[Any], str]
    publish: Callable[[Any], None]

    def _make_lanes(self, schedule: Schedule | None) -> list[Lane]:
        own = self.counters
        return make_lanes(schedule, num_layers=len(self.layers), device=str(own.totals.device), residents=own.residents)

    def _read_batches(self) -> InForce:
        """Read the sizes that SGLang captures, which it sets after the weights have loaded, once in each capture.
        Return the active policy with them.
        """
        if not self._has_read_batches and self._find_batches is not None:
            self._has_read_batches = True
            batches = self._find_batches()
            if batches != self.in_force.batches:
                self.in_force = replace(self.in_force, batches=batches)
        return self.in_force

    def check_switch(
        self, schedule: Schedule | None, rule: Rule | None = None, recaptures: bool = True
    ) -> tuple[InForce, bool]:
        """Return the policy that `switch` would make active, and whether it would capture graphs again. Raises
        ValueError, in one line, if the graphs need a capture that the server cannot do, or `recaptures` does not allow.

        `rule` replaces the schedule's rule for exact requests. Vanilla and `observe` keep the former policy's rule,
        because that policy may come back.
        """
        former = self.in_force
        if rule is None:
            rule = former.rule if schedule is None or schedule.observed else schedule.exact
        schedule = schedule and schedule.weigh(self.acceptance.number)
        latter = replace(former, schedule=schedule, rule=rule, is_named=True)
        if former.ranks is not None and schedule is not None:
            latter = replace(latter, ranks=replace(former.ranks, together=schedule.rows == "batch"))
        if latter.given != former.given:  # the same plans keep their lanes: captured graphs write to their counters
            latter = replace(latter, lanes=self._make_lanes(schedule))
        misfits = {} if schedule is None else self.graphs.find_misfits(latter)
        if self.graphs.rows and latter.ranks != former.ranks:
            misfits["the rows that ranks gather change"] = set()
        if misfits and (self._recapture is None or not recaptures):
            raise ValueError(describe_misfits(misfits, recaptures))
        return latter, bool(misfits)

    def switch(
        self,
        schedule: Schedule | None,
        reporter: Any,
        number: int = 0,
        rule: Rule | None = None,
        recaptures: bool = True,
    ) -> float | None:
        """Select by another schedule, None for vanilla, from the next step on. Return the seconds of a capture, None if
        no graph was captured. `number` is the server's number for this switch, 0 for the former number plus one; `rule`
        and `recaptures` are those of `check_switch`.

        Metrics, log and trace (`reporter` as in `publish`) are updated first, so none of them mixes two policies: the
        host waits for the device twice. Raises ValueError, and keeps the former policy, as `check_switch` does and if
        the capture fails.
        """
        former = self.in_force
        latter, captures = self.check_switch(schedule, rule, recaptures)
        wait_for_device(self.device)
        self.reports.invalidate()  # the step that was in flight at the last look belongs to the former policy
        counted = self.report(reporter)
        seconds = None
        if self.agreement is not None:
            # What is wrong with these plans shows at once. This comes before a capture, which may fail on one rank
            # alone, because all ranks must compare after the same forward.
            self.agreement.forwards = 0
        if captures:
            seconds = self._capture(former, latter)
            latter = self.in_force  # with the sizes that were captured
        else:
            self.graphs.follow(latter)
        wait_for_device(self.device)
        self.since_switch.read()
        self.switches = number or self.switches + 1
        self.disagreement = None
        self.in_force = latter
        if self.trace is not None:
            self.trace.switch(self.switches, latter.given)
        show_plan(latter.plan)
        self.reports.invalidate()
        self.publish(reporter)
        change = f"{json.dumps(former.given)} -> {json.dumps(latter.given)}"
        again = "" if seconds is None else f" (graphs captured again in {seconds:.1f} s)"
        logger.info(
            "Expert policy switch %d: %s%s; until now%s", self.switches, change, again, counted.removeprefix(",")
        )
        return seconds

    def _capture(self, former: InForce, latter: InForce) -> float:
        """Capture all graphs again under the latter policy, and return the seconds. If the capture fails, capture them
        under the former policy, and raise ValueError.
        """
        began = time.monotonic()
        reason = self._capture_under(latter)
        if reason is None:
            return time.monotonic() - began
        then = "the previous policy is active again"
        if again := self._capture_under(former):
            self.graphs = Graphs()
            then += ", without CUDA graphs"
            logger.error("Expert policy: the graphs of the previous policy could not be captured either: %s", again)
        raise ValueError(f"CUDA graphs could not be captured again, {then}: {reason}")

    def _capture_under(self, in_force: InForce) -> str | None:
        """Capture all graphs under a policy, with paged experts those that fit the slots. Return why that failed."""
        assert self._recapture is not None
        self.graphs, self.in_force, self._has_read_batches = Graphs(), in_force, False
        try:
            self._recapture(None if self.paged is None else in_force.fits_slots)
        except Exception as error:
            # As text: a traceback that is kept would keep the memory of the graphs that were captured.
            logger.warning("Expert policy: a capture of CUDA graphs failed\n%s", traceback.format_exc())
            return " ".join(str(error).split())
        return None
