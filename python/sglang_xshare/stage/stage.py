"""The stage of one target model. For each forward it decides which MoE layers select experts, and by which plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.batches import Batches
from ..upstream.graphs import is_capturing
from ..upstream.paging import count_slots
from ..upstream.server import is_recorded
from .acceptance import Acceptance
from .exact import Exact
from .frame import Assignment, Frame, ModelForward
from .gather import Ranks, name_rows
from .graphs import Graphs
from .in_force import InForce
from .lane import Lane, count_vanilla, make_lanes
from .layer import Layer
from .paged import PagedLayers
from .placement import Balance
from .record.agreement import Agreement
from .record.counters import Counters, StepTally
from .record.metadata import Forward
from .record.trace import Trace
from .step import Step, read_key, read_step


@dataclass(frozen=True)
class LastSwitch:
    """The last switch of a stage, as GET /expert_policy reports it. The default values mean that there was no switch.

    Switches are numbered from 1, and `number` is the number of this switch. `posted` is the number of the last switch
    that a POST made. It is lower than `number` if the stage has later switched to vanilla by itself. `is_trial` is True
    if the active policy is a trial of a search (`tune`). `disagreement` is a message that names the ranks that differ,
    or None.
    """

    number: int = 0
    posted: int = 0
    is_trial: bool = False
    disagreement: str | None = None


class Stage:
    """The stage of a loaded model. It selects experts in the MoE layers by the plans of a schedule.

    `start.start` creates one stage in each process. `forward.wrap_calls` then wraps the model, so it calls the stage.

    - `schedule`: the policy's schedule. If it is None, the stage only masks padding rows.
    - `trace`: the file to which the trace is appended, or None.
    - `masks`: if True, padding rows are masked even after a switch to vanilla.
    - `ranks`: describes a server in which each rank routes its own rows. It is None for any other server.
    - `tp_size`: the number of tensor-parallel ranks. If there are several, they compare their selections.
    - `stops`: if True, the server ends when ranks have selected different experts. Otherwise it switches to vanilla.
    - `exact`, `acceptance`: the exact requests, and the estimated chance that a draft is accepted.
    - `find_batches`: takes the policy's key `rows`, "batch" or "rank", and returns the batch sizes that the server's
      steps can have. SGLang decides these sizes after the weights have loaded.
    - `recapture(scheduler, fits)`: captures the graphs again, as `upstream.graphs.capture_again` does.
    """

    def __init__(
        self,
        layers: list[Layer],
        schedule: Schedule | None,
        *,
        device: str,
        trace: Path | None = None,
        masks: bool = False,
        ranks: Ranks | None = None,
        tp_size: int = 1,
        stops: bool = False,
        exact: Exact,
        acceptance: Acceptance,
        find_batches: Callable[[str], Batches],
        recapture: Callable[[Any, Callable[[int], bool] | None], None],
    ) -> None:
        self.layers, self.device, self.stops = layers, device, stops
        masks = masks or schedule is None
        # A GPU server finds the padding rows of every step, by one comparison. A CPU server has no graphs, so only a
        # gather pads rows, and `read_step` always finds the padding rows of a gather. So a CPU server needs this flag
        # only to mask padding rows.
        self.reads_padding = device != "cpu" or masks
        self._layer_ids = layer_ids = [layer.layer_id for layer in layers]
        self.find_batches, self.recapture = find_batches, recapture
        placement = layers[0].placement
        self.balance = None if placement is None else Balance(placement, layer_ids, device)
        self.paged = PagedLayers(layers, device) if layers[0].paging is not None else None
        residents = None if self.paged is None else self.paged.residents
        self.acting = Lane(None, Counters(len(layers), device, residents, self.balance))
        self.current_frame = layers[0].current_frame
        assert all(layer.current_frame is self.current_frame for layer in layers), "all layers run in one forward"
        self.trace = None if trace is None else Trace(trace, layer_ids, device, pages=self.paged is not None)
        self.graphs = Graphs()
        self.agreement = Agreement(tp_size, device) if tp_size > 1 else None
        self.exact, self.acceptance = exact, acceptance
        self.last_switch = LastSwitch()
        rule = Rule() if schedule is None else schedule.exact
        lanes, is_named = make_lanes(schedule, self.acting), schedule is not None
        self.in_force = InForce(schedule, find_batches(name_rows(ranks)), masks, layers, ranks, rule, lanes, is_named)
        """The active policy. A switch, `update_batches` and `_weigh` each replace this object."""

    def run(self, forward_batch: Any, forward: Callable[[], Any]) -> Any:
        """Run `forward` with a plan for each layer, and return its result. Check and count the selections."""
        on_gpu = self.device != "cpu"
        is_recording, in_capture = on_gpu and is_recorded(), on_gpu and is_capturing()
        by_depth = self.in_force.by_depth or (in_capture and self.graphs.by_depth)
        exact = self.exact if self.exact.refusal is None else None
        step = read_step(forward_batch, self.reads_padding, self.in_force.ranks, exact, by_depth)
        if in_capture and step is not None:  # at the capture of prefills SGLang has not set the sizes yet
            self.update_batches()
        in_force, layers = self.in_force, self.layers
        residents = None if step is None or self.paged is None else self.paged.residents
        if residents is not None:
            residents.read()  # one launch for all layers
        key = None if step is None else step.key
        if key is None:
            assignments = [Assignment()] * len(layers)
        elif is_recording:
            assignments = self.graphs.begin_capture(key, in_force)
        else:
            assignments = in_force.assign(key)
        outcome = in_force.find_outcome(key)
        tallies = [StepTally(lane.counters) for lane in in_force.lanes or (self.acting,)]
        model_forward = ModelForward(step, assignments, tallies, residents)
        former = self.current_frame.frame  # the runner's frame; None in a capture, which runs only the model
        frame = self.current_frame.frame = former or Frame()
        frame.outcome, frame.model_forward = outcome, model_forward
        try:
            output = forward()
            if step is not None:
                self._finish(step, model_forward)
                if in_capture and not is_recording and not in_force.observes:
                    self.graphs.prepare(layers, step, model_forward)
            return output
        finally:
            self.current_frame.frame, frame.model_forward = former, None

    def update_batches(self) -> None:
        """Read the captured batch sizes and the largest batch size. SGLang sets them after the weights have loaded."""
        batches = self.find_batches(name_rows(self.in_force.ranks))
        if batches != self.in_force.batches:
            self.in_force = replace(self.in_force, batches=batches)

    def begin_forward(self, forward_batch: Any) -> Frame:
        """Prepare a forward or graph replay: update the acceptance estimate, flag exact rows. Return the new frame."""
        key = read_key(forward_batch, self.in_force.ranks)
        if self.acceptance.begin_forward():
            self._weigh()
        if key is not None and self.exact.is_used:
            self.exact.write(forward_batch.rids or (), key.tokens_per_request)
        return Frame(key)

    def _weigh(self) -> None:
        """Write the latest acceptance estimate to all plans that use it.

        The plans change as in a switch, but the host does not wait for the device.
        """
        schedule = self.in_force.schedule
        if schedule is not None and schedule.estimates:
            self.graphs.weigh(self.in_force, self.acceptance.number)
            schedule = schedule.weigh(self.acceptance.number)
            self.in_force = replace(self.in_force, schedule=schedule)

    def end_forward(self, forward_batch: Any, frame: Frame) -> Forward | None:
        """Count a launched forward or graph replay. Return its record for the `meta_info` of its requests.

        The record is None if no policy has been active yet.
        """
        outcome, ranks = frame.outcome, self.in_force.ranks
        if outcome is None:
            outcome = self.in_force.find_outcome(frame.key and self.graphs.find_key(frame.key))
        # An idle rank that selects among its own rows has no live row, so there is nothing to count.
        if ranks is None or ranks.together or not forward_batch.forward_mode.is_idle():
            self.acting.counters.outcomes[outcome] += 1
        return self.in_force.describe_forward(outcome)

    def _finish(self, step: Step, model_forward: ModelForward) -> None:
        """Check that each layer with a plan has selected experts, and count the selections."""
        model_forward.check(self._layer_ids)
        if not model_forward.has_selected:
            return
        tally, observes = model_forward.tallies[0].layers, self.in_force.observes
        if tally is not None and self.balance is not None:
            # Under `observe` the experts of the model's own routing are active.
            self.balance.count(replace(tally, active=tally.vanilla_active) if observes else tally)
        observed = {}
        if observes:
            lanes = zip(self.in_force.lanes, model_forward.tallies, strict=True)
            observed = {lane.name: lane.counters.count(step, own) for lane, own in lanes}
            counts = count_vanilla(next(iter(observed.values())))
            self.acting.counters.totals += counts
        else:
            fits = [assignment.fits for assignment in model_forward.assignments] if self.paged is not None else []
            counts = self.acting.counters.count(step, model_forward.tallies[0], fits)
            if tally is not None and self.agreement is not None and self.agreement.compares(self.in_force.ranks):
                self.agreement.count(tally.active)
        if self.trace is not None:
            self.trace.record(counts, step, observed)

    def fits_slots(self, method: Any) -> bool:
        """Return whether the active experts of a layer fit its page slots.

        `method` is SGLang's `PagedExpertsMoEMethod` of the layer.
        """
        model_forward = self.current_frame.model_forward
        if model_forward is None:
            return False
        if self.paged is None:
            # If each expert has a page slot, the experts of every step fit. A prefill still uses SGLang's path on the
            # host: SGLang's kernel runs on one warp, and is slower than the host for so many ids.
            return model_forward.step is not None and count_slots(method) >= method.num_experts
        return self.paged.fits_slots(method, model_forward)

    def allows_graph(self, forward_batch: Any) -> bool:
        """Return whether a graph may be replayed for a batch.

        A stale graph may not be replayed, because it cannot route as the model does after a switch to vanilla. A graph
        may also not be replayed if its step could have more active experts than a layer has page slots. Such a step
        runs eagerly, and SGLang loads the experts in several waves.
        """
        if self.paged is None and not self.graphs.stale:
            return True
        # In a verify step SGLang calls this method twice. The first call plans attention before a frame exists. The
        # second call happens in the forward. Both answers must be equal, so the first call reads the same key from the
        # batch.
        frame = self.current_frame.frame
        key = read_key(forward_batch, self.in_force.ranks) if frame is None else frame.key
        if key is None:
            return True
        captured = self.graphs.find_key(key)
        return captured not in self.graphs.stale and self.in_force.fits(captured)
