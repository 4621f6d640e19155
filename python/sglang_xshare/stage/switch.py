"""A switch of the active policy between two steps: check the new policy, update the CUDA graphs, assign the policy."""

import json
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.graphs import check_memory, find_largest
from ..upstream.ranks import is_first_rank
from ..upstream.server import end_server, show_plan, wait_for_device
from .gather import name_rows
from .graphs import Changes, Graphs, describe_misfits
from .in_force import InForce
from .lane import make_lanes
from .reports import Reports
from .stage import LastSwitch, Stage
from .step import StepKey

logger = logging.getLogger(__name__)


def make_next(stage: Stage, schedule: Schedule | None, rule: Rule | None = None) -> InForce:
    """Return the object that replaces `Stage.in_force` in a switch to `schedule`.

    `schedule` is None for vanilla. `rule` decides which requests are exact. If `rule` is None, the schedule's own rule
    decides. A switch to vanilla or `observe` then keeps the active policy's rule, because that policy may become active
    again.
    """
    former = stage.in_force
    if rule is None:
        rule = former.rule if schedule is None or schedule.observed else schedule.exact
    latter = refresh(stage, replace(former, schedule=schedule, rule=rule, is_named=True))
    if latter.given == former.given:  # keep the lanes, because captured graphs write to their counters
        return latter
    return replace(latter, lanes=make_lanes(schedule, stage.acting))


def refresh(stage: Stage, latter: InForce) -> InForce:
    """Return `latter` for a switch now: with the latest acceptance estimate, and with the server's batch sizes.

    A switch to vanilla keeps `ranks`, so no graph has to be captured again. This is safe: vanilla routes each row by
    itself, so it does not matter which rows the ranks gather.
    """
    former, schedule, ranks = stage.in_force, latter.schedule, stage.in_force.ranks
    if schedule is not None:
        schedule = schedule.weigh(stage.acceptance.number)
        ranks = ranks and replace(ranks, together=schedule.rows == "batch")
    batches = former.batches if ranks == former.ranks else stage.find_batches(name_rows(ranks))
    return replace(latter, schedule=schedule, ranks=ranks, batches=batches)


def check_graphs(stage: Stage, latter: InForce, recaptures: bool = True) -> Changes | None:
    """Return the changes that a switch to `latter` makes to the captured graphs.

    Return None if the switch captures all graphs again. It does so if a graph cannot follow `latter`, if the rows that
    ranks gather change, or if a capture adds graphs that the server lacks. A switch to vanilla never captures graphs.
    With `recaptures` False, no switch captures graphs. Raises ValueError if the switch then cannot be made.
    """
    changes = stage.graphs.find_changes(latter)
    misfits = {} if latter.schedule is None else dict(changes.misfits)
    if stage.graphs.captured and latter.ranks != stage.in_force.ranks:
        misfits["the rows that ranks gather change"] = set()
    if misfits and not recaptures:
        raise ValueError(describe_misfits(misfits))
    return None if misfits or (recaptures and _adds_graphs(stage, latter)) else changes


def _adds_graphs(stage: Stage, latter: InForce) -> bool:
    """Return whether a capture under the policy `latter` would add CUDA graphs that the server lacks.

    Without paged experts, a server lacks graphs only after a failed capture. With paged experts, a server may also lack
    graphs of larger batch sizes. The active experts of these sizes did not fit the page slots under the policy of the
    last capture. A switch to vanilla never captures graphs.
    """
    if latter.schedule is None:
        return False
    if stage.paged is None or not stage.graphs.captured:
        return stage.graphs.lost
    # With paged experts SGLang does not speculate, so a request is one row.
    largest, most = find_largest(_find_fits(latter)), latter.batches.most  # a request pool of `most` limits all sizes
    return (largest if most is None else min(largest, most)) > max(stage.graphs.rows)


def _find_fits(in_force: InForce) -> Callable[[int], bool]:
    """Return a function that takes a number of requests and returns whether their active experts fit the page slots."""
    return lambda requests: in_force.fits(StepKey("decode", requests))


def switch(reports: Reports, latter: InForce, last_switch: LastSwitch, recaptures: bool = True) -> float | None:
    """Make `latter` the active policy from the next step on.

    Return the seconds that a capture of CUDA graphs took, or None if no graph was captured. `last_switch` describes
    this switch, and the stage stores it. The log, the metrics and the trace are updated first, so none of them mixes
    the counts of two policies. The host waits for the device several times. Raises ValueError, and keeps the previous
    policy, if `check_graphs` raises or if the capture fails.
    """
    stage, former = reports.stage, reports.stage.in_force
    changes = check_graphs(stage, latter, recaptures)
    wait_for_device(stage.device)
    # `always` is set, because the last update may have missed a step that was still running under the previous policy.
    reports.publish(always=True)
    counted = reports.log()
    seconds = None
    if changes is None:
        try:
            seconds = _capture(stage, latter, reports.reporter.scheduler)
        except ValueError:
            logger.info("Expert policy: no switch; until now%s", counted.removeprefix(","))
            raise
    else:
        stage.graphs.follow(changes)
        stage.in_force = latter
    wait_for_device(stage.device)
    stage.acting.since_switch.read()
    stage.last_switch = last_switch
    if stage.trace is not None:
        stage.trace.switch(last_switch.number, latter.given)
    show_plan(stage.in_force.shown)
    reports.publish(always=True)
    change = f"{json.dumps(former.given)} -> {json.dumps(latter.given)}"
    change += "" if seconds is None else f" (graphs captured again in {seconds:.1f} s)"
    logger.info("Expert policy switch %d: %s; until now%s", last_switch.number, change, counted.removeprefix(","))
    return seconds


def compare_ranks(reports: Reports) -> None:
    """Compare the selections of all ranks after a forward, if a comparison is due.

    If the selections differ, log an error. Then end the server if `stage.stops` is set, else switch to vanilla. No
    switch is needed under `observe` or without a policy. All ranks compare their selections after the same forward.
    """
    stage = reports.stage
    agreement, in_force = stage.agreement, stage.in_force
    if agreement is None or not (which := agreement.end_forward(in_force.ranks)):
        return
    reason = (
        f"ranks {which} have selected other experts than the first: their policies, router logits or placements "
        "differ, and the sum of their outputs was wrong"
    )
    selects = in_force.schedule is not None and not in_force.observes
    then = "vanilla from the next step on" if selects else "no policy is active"
    log = logger.error if is_first_rank() else logger.debug
    log("Expert policy: %s; %s", reason, "the server ends" if stage.stops else then)
    if stage.stops:
        end_server()
    last_switch = replace(stage.last_switch, is_trial=False, disagreement=reason)
    if not selects:
        stage.last_switch = last_switch
        return
    agreement.counts["fallbacks"] += 1
    switch(reports, make_next(stage, None), replace(last_switch, number=last_switch.number + 1))


def _capture(stage: Stage, latter: InForce, scheduler: Any) -> float:
    """Activate `latter`, and capture all CUDA graphs again. Return the seconds that the capture took.

    If the capture fails, capture the graphs of the previous policy again, and raise ValueError.
    """
    check_memory(scheduler)  # an access to released memory would end the server
    began, former = time.monotonic(), stage.in_force
    reason = _capture_under(stage, latter, scheduler)
    if reason is None:
        return time.monotonic() - began
    then = "the previous policy is active again"
    if again := _capture_under(stage, former, scheduler):
        stage.graphs = Graphs(lost=True)
        then += ", without CUDA graphs"
        logger.error("Expert policy: the graphs of the previous policy could not be captured either: %s", again)
    raise ValueError(f"CUDA graphs could not be captured again, {then}: {reason}")


def _capture_under(stage: Stage, in_force: InForce, scheduler: Any) -> str | None:
    """Capture all CUDA graphs under a policy. Return the error message if the capture fails, else None.

    With paged experts, only graphs whose active experts fit the page slots are captured.
    """
    stage.graphs, stage.in_force = Graphs(), in_force
    try:
        stage.recapture(scheduler, None if stage.paged is None else _find_fits(in_force))
    except Exception as error:
        # The text is returned, because the exception object would keep the memory of the captured graphs.
        logger.warning("Expert policy: a capture of CUDA graphs failed\n%s", traceback.format_exc())
        return " ".join(str(error).split())
    return None
