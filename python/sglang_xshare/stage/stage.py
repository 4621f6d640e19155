"""The stage around one target model: decides for every forward whether, and with which plan, its MoE layers select."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..policies.description import describe_mass
from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.batches import Batches
from ..upstream.graphs import is_capturing
from ..upstream.paging import count_slots
from ..upstream.ranks import is_first_rank
from ..upstream.server import end_server, is_recorded
from . import handover
from .acceptance import Acceptance
from .evidence.agreement import Agreement
from .evidence.balance import Balance
from .evidence.counters import Counters, Reader
from .evidence.metadata import Forward
from .evidence.trace import Trace
from .exact import Exact
from .frame import Frame, Slot
from .gather import Ranks
from .graphs import Graphs, assign
from .in_force import InForce
from .lane import Lane, count_vanilla, find_tables
from .layer import Layer
from .paged import PagedLayers
from .reports import Reports
from .step import Step, read_key, read_step
from .switch import Switching

logger = logging.getLogger(__name__)


class Stage(Switching):
    """Has the MoE layers of a loaded model select by a schedule. `hooks.attach` makes one a process;
    `forward.wrap_calls` puts it around the model.

    `schedule` is None where no policy is given and padding rows alone are masked. `trace` is the file to append to.
    `batches` are what the server's steps can have, `ranks` those of a server whose ranks each route rows of their own.
    With `masks` padding rows are masked also once it is switched to vanilla. Where `tp_size` tensor-parallel ranks are
    several, they compare what they have selected: where that differs the server goes back to vanilla, or with `stops`
    ends. `exact` knows the exact requests, `acceptance` what requests accept of their drafts. `find_batches` returns
    the batches with the sizes that SGLang captures, once a capture runs; `recapture` captures all graphs anew, or those
    of a number of requests for which the function that it is called with returns True.
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
        find_batches: Callable[[], Batches] | None = None,
        recapture: Callable[[Callable[[int], bool] | None], None] | None = None,
    ) -> None:
        self.layers = layers
        self._layer_ids = layer_ids = [layer.layer_id for layer in layers]
        self.device = device
        self.masks = masks or schedule is None
        # A CPU server captures no graphs, so that only a gather pads its rows, and those are always masked. Elsewhere
        # the mask takes one comparison a step.
        self.reads_padding = device != "cpu"
        placement = layers[0].placement
        self.balance = None if placement is None else Balance(placement, layer_ids, device)
        paged = [layer for layer in layers if layer.paging is not None]
        for number, layer in enumerate(layers):
            layer.number = number
        self.paged = PagedLayers(paged, device) if paged else None
        self.residents = None if self.paged is None else self.paged.residents
        self.counters = Counters(len(layers), device, self.residents, self.balance)
        self.acting = Lane(None, self.counters)
        self.slot = Slot(self.counters)
        for layer in layers:
            layer.slot = self.slot
        self.since_switch = Reader(self.counters)
        self.trace = None if trace is None else Trace(trace, layer_ids, device, pages=bool(paged))
        self.graphs = Graphs()
        self._find_batches, self._recapture = find_batches, recapture
        self.agreement = Agreement(tp_size, device) if tp_size > 1 else None
        self.stops = stops
        self.disagreement = None
        self.reporter: Any = None
        """Upstream's, of the scheduler; None before its first request."""
        self.exact = exact or Exact(device)
        self.acceptance = acceptance or Acceptance()
        self.switches = 0
        rule = Rule() if schedule is None else schedule.exact
        lanes = self._make_lanes(schedule)
        self.in_force = InForce(schedule, batches, self.masks, layers, ranks, rule, lanes, schedule is not None)
        self.reports = Reports(
            self.acting, lambda: self.in_force, self.agreement, self.trace, lambda: self.acceptance.estimate
        )
        name = schedule.policy if schedule else "none, padding masked,"
        plan = f": {json.dumps(self.in_force.plan)}" if schedule else ""
        mass = describe_mass(schedule) if schedule else None
        kept = f"; a step keeps at least this share of its batch's utility: {mass}" if mass else ""
        logger.info("Expert policy %s on %d MoE layers%s%s", name, len(layers), plan, kept)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of `InForce`."""
        return self.in_force.ranks

    def run(self, forward_batch: Any, forward: Callable[[], Any]) -> Any:
        """Return what `forward` returns. Layers get assignments; what they select is checked and counted."""
        in_force = self.in_force
        by_depth = in_force.by_depth or self.graphs.by_depth
        masks = self.reads_padding or in_force.masks_only
        step = read_step(forward_batch, masks, self.ranks, self.exact, by_depth)
        is_captured = self.device != "cpu" and is_recorded()
        captures = self.device != "cpu" and is_capturing()
        if captures and step is not None:  # SGLang captures prefills before it sets the sizes of decode graphs
            in_force = self._read_batches()
        steps = [step] * len(self.layers) if step is None or self.paged is None else self.paged.divide(step)
        assignments, reasons = assign(self.layers, steps, in_force, self.graphs, is_captured)
        with self._hold() as frame:
            outcome = in_force.name_outcome(reasons)
            self.counters.count_outcome(outcome, step)
            frame.assign(assignments)
            frame.observed = in_force.schedule if in_force.observes else None
            tables = [lane.counters.begin() for lane in in_force.lanes or [self.acting]]
            frame.begin(step, outcome, tables, in_force.calls)
            try:
                output = forward()
                if step is not None:
                    self._finish(frame, step, captures and not is_captured)
                return output
            finally:
                frame.is_running = False
                handover.withdraw()

    @contextmanager
    def _hold(self) -> Iterator[Frame]:
        """Yield the frame of the model runner's forward, or of the model's own: SGLang captures the model's alone."""
        former = self.slot.frame
        self.slot.frame = frame = former or Frame()
        try:
            yield frame
        finally:
            self.slot.frame = former

    @contextmanager
    def open(self, forward_batch: Any) -> Iterator[Frame]:
        """Yield the frame of a forward of the model runner, which is launched meanwhile, maybe by a graph's replay."""
        self.begin_forward(forward_batch)
        with self._hold() as frame:
            yield frame

    def begin_forward(self, forward_batch: Any) -> None:
        """A forward is about to be launched: weigh drafts by the latest estimate, and mark the exact rows."""
        if self.acceptance.begin_forward():
            self._weigh()
        key = read_key(forward_batch, self.ranks) if self.exact.is_used else None
        if key is not None:
            self.exact.write(forward_batch.rids or (), key.tokens_per_request)

    def _weigh(self) -> None:
        """Have plans that ask for it weigh drafts by another estimate: a switch that waits for nothing."""
        schedule = self.in_force.schedule
        if schedule is not None and schedule.estimates:
            self.graphs.weigh(self.in_force, self.acceptance.number)
            schedule = schedule.weigh(self.acceptance.number)
            self.in_force = replace(self.in_force, schedule=schedule)

    def admit(self, scheduler: Any, req: Any) -> None:
        """A request arrives, at every rank alike: whether it is exact is decided for all of its steps."""
        self.exact.admit(req, self.in_force.rule, bool(getattr(scheduler, "enable_hicache_storage", False)))
        self.reporter = scheduler.metrics_reporter

    def end_forward(self, frame: Frame, forward_batch: Any) -> Forward | None:
        """A forward was launched or replayed. Returns what its requests count; None if no policy was ever in force."""
        key = read_key(forward_batch, self.ranks) if frame.outcome is None else None
        forward = self.in_force.tell(frame.outcome, key and self.graphs.find_key(key))
        if self.agreement is not None and (which := self.agreement.end_forward(self.ranks)):
            self._stop_disagreeing(self.agreement, which)
        # With data-parallel attention the first rank reports for all, and may itself decode nothing for long.
        if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
            self.publish(self.reports.count_forward())
        return forward

    def join(self, topk_config: Any) -> None:
        """Select in a layer that this rank has no rows for: where ranks gather theirs, the others wait for it."""
        layer = getattr(topk_config, "layer", None)
        if layer is not None and self.ranks is not None:
            layer.join(self.ranks.num_experts, self.device)

    def _stop_disagreeing(self, agreement: Agreement, which: list[int]) -> None:
        """Ranks `which` have selected otherwise than the first, and every rank knows it after the same forward: go back
        to vanilla from the next on, or end the server, where it `stops` then. Where the model routes by itself there is
        nothing to go back to.
        """
        reason = (
            f"ranks {which} have selected other experts than the first: their policies, router logits or placements "
            "differ, and the sum of their outputs was wrong"
        )
        selects = self.in_force.schedule is not None and not self.in_force.observes
        then = "vanilla from the next step on" if selects else "no policy is in force"
        log = logger.error if is_first_rank() else logger.debug
        log("Expert policy: %s; %s", reason, "the server ends" if self.stops else then)
        if self.stops:
            end_server()
        if selects:
            agreement.counts["fallbacks"] += 1
            self.switch(None, self.reporter)
        self.disagreement = reason

    def _finish(self, frame: Frame, step: Step, is_next_captured: bool) -> None:
        """Check that every layer with a plan has selected, and count what it chose. The graph of a step that is
        captured next gets its buffers.
        """
        if not frame.check(self._layer_ids):
            return
        tables = find_tables(frame)
        if tables is not None and self.balance is not None:
            self.balance.count(tables)
        observed = {}
        if frame.observed is not None:
            lanes = zip(self.in_force.lanes, frame.tables, strict=True)
            observed = {lane.name: lane.counters.count(step, own) for lane, own in lanes}
            counts = count_vanilla(next(iter(observed.values())))
            self.counters.totals += counts
        else:
            fits = [assignment.fits for assignment in frame.assignments] if self.residents is not None else []
            counts = self.counters.count(step, frame.tables[0], fits)
            if is_next_captured:
                self.graphs.prepare(self.layers, frame, step)
            if tables is not None and self.agreement is not None and (self.ranks is None or self.ranks.together):
                self.agreement.count(tables.active)
        if self.trace is not None:
            self.trace.record(counts, step, observed)

    def fits_slots(self, method: Any) -> bool:
        """Whether what upstream's `PagedExpertsMoEMethod` was just handed is sure to fit its slots."""
        frame = self.slot.frame
        if frame is None or not frame.is_running:
            return False
        if self.paged is None:  # of a prefill's entries upstream's kernel on one warp would be the slower way
            return frame.step is not None and count_slots(method) >= method.num_experts
        return self.paged.fits(method, frame)

    def allows_graph(self, forward_batch: Any) -> bool:
        """Whether a decode graph may be replayed: not if it could not follow to vanilla, nor if the policy in force
        since a switch could have more experts active than the slots it pages them into. Such a step runs eagerly, in as
        many waves as it takes.
        """
        if self.paged is None and not self.graphs.stale:
            return True
        key = read_key(forward_batch, self.ranks)
        if key is None:
            return True
        captured = self.graphs.find_key(key)
        return captured not in self.graphs.stale and all(self.in_force.fit(layer, captured) for layer in self.layers)

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
