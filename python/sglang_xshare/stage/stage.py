"""The stage around one target model: decides for every forward whether, and with which plan, its MoE layers select."""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..policies.description import describe_mass
from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.batches import Batches
from ..upstream.paging import count_slots
from ..upstream.ranks import is_first_rank
from ..upstream.server import end_server, is_recorded, show_plan, wait_for_device
from . import handover
from .acceptance import Acceptance
from .assignment import assign, check_selected
from .evidence.agreement import Agreement
from .evidence.balance import Balance
from .evidence.counters import Counters, Reader
from .evidence.metadata import Forward
from .evidence.observe import Observation
from .evidence.reports import Reports
from .evidence.trace import Trace
from .exact import Exact
from .gather import Ranks
from .graphs import Graphs
from .layer import Layer
from .outcomes import Outcomes
from .paged import PagedLayers
from .plans import Plans
from .routing import Routing
from .step import Step, read_key, read_step

logger = logging.getLogger(__name__)


class Stage:
    """Has the MoE layers of a loaded model select by a schedule. `hooks.attach` makes one a process;
    `forward.wrap_calls` puts it around the model.

    `schedule` is None where no policy is given and padding rows alone are masked. `trace` is the file to append to.
    `batches` are what the server's steps can have, `ranks` those of a server whose ranks each route rows of their own.
    With `masks` padding rows are masked also once it is switched to vanilla. Where `tp_size` tensor-parallel ranks are
    several, they compare what they have selected: where that differs the server goes back to vanilla, or with `stops`
    ends. `exact` knows the exact requests, `acceptance` what requests accept of their drafts.
    """

    def __init__(
        self,
        layers: list[Layer],
        schedule: Schedule | None,
        *,
        device: str,
        trace: Path | None = None,
        batches: Batches = Batches(),  # noqa: B008 - it never changes
        masks: bool = False,
        ranks: Ranks | None = None,
        tp_size: int = 1,
        stops: bool = False,
        exact: Exact | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        self.layers = layers
        self.batches = batches
        self.ranks = ranks
        self.device = device
        self.masks = masks or schedule is None
        paged = [layer for layer in self.layers if layer.paging is not None]
        self.paged = PagedLayers(paged, device) if paged else None
        self.residents = None if self.paged is None else self.paged.residents
        self._layer_ids = layer_ids = [layer.layer_id for layer in self.layers]
        placement = self.layers[0].placement
        self.balance = None if placement is None else Balance(placement, layer_ids, device)
        self.counters = Counters(len(layers), device, self.residents, self.balance)
        self.since_switch = Reader(self.counters)
        self.trace = None if trace is None else Trace(trace, layer_ids, device, pages=bool(paged))
        self.graphs = Graphs(batches.captured)
        self.agreement = Agreement(tp_size, device) if tp_size > 1 else None
        self.stops = stops
        self.disagreement: str | None = None
        """How ranks have selected differently since somebody last switched; they do not any more."""
        self.reporter: Any = None
        """Upstream's, of the scheduler; None before its first request."""
        self.exact = exact or Exact(device)
        self.acceptance = acceptance or Acceptance()
        self.reports = Reports(self.counters, self.agreement, self.trace, lambda: self.acceptance.estimate)
        for number, layer in enumerate(self.layers):
            layer.find_tally = functools.partial(self.counters.tally, number)
        self.routing = Routing(layers, self.counters, device, None if ranks is None else ranks.num_experts)
        self.outcomes = Outcomes(self.layers, self.graphs)
        self.switches = 0
        self.rule = Rule()
        """Which arriving requests are exact: by the last policy that selects, since it may come back meanwhile."""
        self.observation: Observation | None = None
        self.plans = Plans(schedule, batches, self.masks)
        self._adopt(self.plans)
        name = schedule.policy if schedule else "none, padding masked,"
        plan = f": {json.dumps(self.plan)}" if schedule else ""
        mass = describe_mass(schedule) if schedule else None
        kept = f"; a step keeps at least this share of its batch's utility: {mass}" if mass else ""
        logger.info("Expert policy %s on %d MoE layers%s%s", name, len(layers), plan, kept)

    def _adopt(self, plans: Plans) -> None:
        """Have these plans in force from the next step on, and everything that reports them say so."""
        schedule = plans.schedule
        if schedule is None or not schedule.observed:
            self.observation = None
        # Of the same plans it stays: captured graphs add to its tensors where they lie.
        elif self.observation is None or plans.given != self.plans.given:
            self.observation = Observation(schedule, self._layer_ids, self.device, self.residents)
        self.routing.observation = self.observation
        self.plans = plans
        for layer in self.layers:
            layer.calls.clear()
        if schedule is not None and not schedule.observed:
            self.rule = schedule.exact
        if self.ranks is not None and schedule is not None:
            self.ranks = replace(self.ranks, together=schedule.rows == "batch")
        # A CPU server captures no graphs, so that only a gather pads its rows, and those are always masked. Elsewhere
        # the mask takes one comparison a step.
        self.mask_padding = self.device != "cpu" or plans.masks
        if self.trace is not None:
            self.trace.observe(list(schedule.observed) if schedule else [])
        self.plan = None if plans.masks and not self.switches else plans.describe(self.layers[0].router.top_k)
        """The plan in force, JSON-able; None where padding rows alone are masked."""
        self.outcomes.adopt(plans, self.plan)
        self.reports.set_sources(self.plan, self.observation)

    def check_switch(self, schedule: Schedule | None) -> Plans:
        """The plans that `switch` would adopt. Raises ValueError in one line where it could not follow."""
        if self.ranks is not None and self.graphs.captures and schedule is not None:
            self.ranks.check(schedule.rows)
        plans = Plans(schedule and schedule.weigh(self.acceptance.number), self.batches, self.masks)
        self.graphs.check(self.plans, plans)
        return plans

    def switch(self, schedule: Schedule | None, reporter: Any, number: int = 0, rule: Rule | None = None) -> None:
        """Select by another schedule, None for vanilla, from the next step on; between two steps. Metrics, log and
        trace (`reporter` as in `publish`) are brought up to date first, so that none mixes both: the host waits for the
        device, twice. `number` is the server's for this switch, 0 for the next one; `rule` replaces the schedule's for
        exact requests. Raises ValueError, and changes nothing, as `check_switch` does.
        """
        plans = self.check_switch(schedule)
        wait_for_device(self.device)
        former = self.plans.given
        self.reports.invalidate()  # the step that was in flight at the last look belongs to the former plans
        counted = self.report(reporter)
        self.graphs.follow(self.plans, plans)
        wait_for_device(self.device)
        self.since_switch.read()
        self.switches = number or self.switches + 1
        self.disagreement = None
        if self.agreement is not None:
            self.agreement.forwards = 0  # what is wrong with these plans shows at once
        self._adopt(plans)
        self.rule = rule or self.rule
        if self.trace is not None:
            self.trace.switch(self.switches, plans.given)
        show_plan(self.plan)
        self.reports.invalidate()
        self.publish(reporter)
        change = f"{json.dumps(former)} -> {json.dumps(plans.given)}"
        logger.info("Expert policy switch %d: %s; until now%s", self.switches, change, counted.removeprefix(","))

    def run(self, forward_batch: Any, forward: Callable[[], Any]) -> Any:
        """What `forward` returns of this batch: layers get assignments, what they selected is checked and counted."""
        by_depth = self.plans.by_depth or self.graphs.by_depth
        step = read_step(forward_batch, self.mask_padding, self.ranks, self.exact, by_depth)
        is_captured = self.device != "cpu" and is_recorded()
        steps = [step] * len(self.layers) if step is None or self.paged is None else self.paged.divide(step)
        reasons = assign(self.layers, steps, self.plans, self.graphs, is_captured)
        self.counters.count_outcome(self.outcomes.begin(reasons), step)
        self.routing.is_running = True
        try:
            output = forward()
            if step is not None:
                self._finish(step, is_captured)
            return output
        finally:
            self.routing.is_running = False
            handover.withdraw()

    def admit(self, scheduler: Any, req: Any) -> None:
        """A request arrives, at every rank alike: whether it is exact is decided for all of its steps."""
        self.exact.admit(req, self.rule, bool(getattr(scheduler, "enable_hicache_storage", False)))
        self.reporter = scheduler.metrics_reporter

    def begin_forward(self, forward_batch: Any) -> None:
        """A forward of the model runner is about to be launched, maybe by a graph's replay."""
        self.outcomes.outcome = None
        if self.acceptance.begin_forward():
            self._weigh()
        key = read_key(forward_batch, self.ranks) if self.exact.is_used else None
        if key is not None:
            self.exact.write(forward_batch.rids or (), key.tokens_per_request)

    def _weigh(self) -> None:
        """Have plans that ask for it weigh drafts by another estimate: a switch that waits for nothing."""
        schedule = self.plans.schedule
        if schedule is not None and schedule.estimates:
            self.graphs.weigh(self.plans, self.acceptance.number)
            self._adopt(Plans(schedule.weigh(self.acceptance.number), self.batches, self.masks))

    def end_forward(self, forward_batch: Any) -> Forward | None:
        """A forward was launched or replayed. Returns what its requests count; None if no policy was ever in force."""
        forward = self.outcomes.describe(forward_batch, self.ranks)
        if self.agreement is not None and (which := self.agreement.end_forward(self.ranks)):
            self._stop_disagreeing(self.agreement, which)
        # With data-parallel attention the first rank reports for all, and may itself decode nothing for long.
        if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
            self.publish(self.reports.count_forward())
        return forward

    def _stop_disagreeing(self, agreement: Agreement, which: list[int]) -> None:
        """Ranks `which` have selected otherwise than the first, and every rank knows it after the same forward: go back
        to vanilla from the next on, or end the server, where it `stops` then or its graphs cannot follow. Where the
        model routes by itself there is nothing to go back to.
        """
        reason = (
            f"ranks {which} have selected other experts than the first: their policies, router logits or placements "
            "differ, and the sum of their outputs was wrong"
        )
        selects = self.plans.schedule is not None and self.observation is None
        then = "vanilla from the next step on" if selects else "no policy is in force"
        log = logger.error if is_first_rank() else logger.debug
        log("Expert policy: %s; %s", reason, "the server ends" if self.stops else then)
        if self.stops:
            end_server()
        if selects:
            agreement.counts["fallbacks"] += 1
            try:
                self.switch(None, self.reporter)
            except ValueError as error:
                log("Expert policy: the server ends, it cannot be switched to vanilla: %s", error)
                end_server()
        self.disagreement = reason

    def _finish(self, step: Step, is_captured: bool) -> None:
        """Check that every layer with a plan has selected, and count what it chose."""
        check_selected(self.layers, step)
        if all(layer.selection is None for layer in self.layers):
            return
        tables = self.counters.tables if self.observation is None else self.observation.tables
        if tables is not None and self.balance is not None:
            self.balance.count(tables)
        if self.observation is not None:
            counts, observed = self.observation.count(step)
            self.counters.totals += counts
        else:
            fits = [layer.assignment.fits for layer in self.layers] if self.residents is not None else []
            counts, observed = self.counters.count(step, fits), []
            if not is_captured:
                self.graphs.prepare(self.layers, step)
            if tables is not None and self.agreement is not None and (self.ranks is None or self.ranks.together):
                self.agreement.count(tables.active)
        if self.trace is not None:
            self.trace.record(counts, step, observed)

    def fits_slots(self, method: Any) -> bool:
        """Whether what upstream's `PagedExpertsMoEMethod` was just handed is sure to fit its slots."""
        if self.paged is None:  # of a prefill's entries upstream's kernel on one warp would be the slower way
            is_step = self.routing.is_running and self.layers[0].assignment.step is not None
            return is_step and count_slots(method) >= method.num_experts
        return self.routing.is_running and self.paged.fits(method)

    def allows_graph(self, forward_batch: Any) -> bool:
        """Whether a decode graph may be replayed: not where the plans in force since a switch could have more experts
        active than the slots it pages them into. Such a step runs eagerly, in as many waves as it takes.
        """
        if self.paged is None or (key := read_key(forward_batch, self.ranks)) is None:
            return True
        captured = self.graphs.find_key(key)
        return all(self.plans.fit(layer, captured) for layer in self.layers)

    def report(self, reporter: Any) -> str:
        """What happened since the last line of the decode log."""
        self.publish(reporter)
        return self.reports.log()

    def publish(self, reporter: Any) -> None:
        """Bring metrics and trace up to date, on one rank: all have seen the same steps. The host waits for the device
        only here and in `report`: once a log interval, and when the server turns idle. Does nothing without a
        `reporter`.
        """
        if reporter is None or not is_first_rank() or not self.reports.is_due(reporter):
            return
        if self.paged is not None:
            self.paged.check(self.counters.totals)
        self.reports.publish(reporter)

    def close(self) -> None:
        """Write the trace, and log what was counted, at the end of a process that had no scheduler to report in, as
        `python -m sglang.benchmark.one_batch` has none.
        """
        if self.reporter is None and is_first_rank():
            self.reports.close()
