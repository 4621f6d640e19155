"""A switch to another policy between two steps: check the next value, make graphs follow, assign the value."""

import json
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.graphs import check_memory, find_cap
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
    """Return the next `InForce`, for a switch from the active policy to `schedule`, which is None for vanilla.

    `rule` replaces the schedule's rule for exact requests. Vanilla and `observe` keep the active policy's rule, because
    that policy may become active again. For vanilla `ranks` stay unchanged: vanilla routes each row by itself,
    whichever rows ranks gather, so no graph has to be captured again.
    """
    former, ranks = stage.in_force, stage.in_force.ranks
    if rule is None:
        rule = former.rule if schedule is None or schedule.observed else schedule.exact
    schedule = schedule and schedule.weigh(stage.acceptance.number)
    if ranks is not None and schedule is not None:
        ranks = replace(ranks, together=schedule.rows == "batch")
    batches = former.batches if ranks == former.ranks else stage.find_batches(name_rows(ranks))
    latter = replace(former, schedule=schedule, rule=rule, ranks=ranks, batches=batches, is_named=True)
    if latter.given == former.given:  # keep the lanes, to whose counters captured graphs write
        return latter
    return replace(latter, lanes=make_lanes(schedule, stage.acting))


def make_again(stage: Stage, former: InForce) -> InForce:
    """Return a policy that was active before, for a switch back: with the latest estimate and captured sizes."""
    again = make_next(stage, former.schedule, former.rule)
    return replace(again, lanes=former.lanes, is_named=former.is_named)


def check_graphs(stage: Stage, latter: InForce, recaptures: bool = True) -> Changes | None:
    """Return what a switch to `latter` changes in the captured graphs; None if it captures them again.

    With `recaptures` a switch may capture, and also captures to add graphs that the server lacks. Raises ValueError if
    the switch would have to capture and `recaptures` is False.
    """
    changes = stage.graphs.find_changes(latter)
    misfits = {} if latter.schedule is None else changes.misfits
    if stage.graphs.captured and latter.ranks != stage.in_force.ranks:
        misfits["the rows that ranks gather change"] = set()
    if misfits and not recaptures:
        raise ValueError(describe_misfits(misfits))
    return None if misfits or (recaptures and _adds_graphs(stage, latter)) else changes


def _adds_graphs(stage: Stage, latter: InForce) -> bool:
    """Return whether a capture under `latter` adds graphs.

    After a failed capture it adds all graphs; with paged experts it adds the sizes at which the last capture's policy
    did not fit the page slots. A switch to vanilla never captures.
    """
    if latter.schedule is None:
        return False
    if stage.paged is None or not stage.graphs.captured:
        return stage.graphs.lost
    sizes = stage.find_batches(name_rows(latter.ranks)).captured
    return find_cap(sizes, _find_fits(latter)) > max(stage.graphs.rows)


def _find_fits(in_force: InForce) -> Callable[[int], bool]:
    """Return a function that returns whether the experts of a number of requests fit each layer's page slots."""
    return lambda requests: in_force.fits(StepKey("decode", requests))


def switch(reports: Reports, latter: InForce, last_switch: LastSwitch, recaptures: bool = True) -> float | None:
    """Make `latter` the active policy from the next step on. Return the seconds of a capture, None without a capture.

    The stage keeps `last_switch`, which describes this switch.

    Metrics, log and trace are updated first, so none of them mixes two policies. The host waits for the device several
    times. Raises ValueError, and keeps the former policy, if `check_graphs` raises or if the capture fails.
    """
    stage, former = reports.stage, reports.stage.in_force
    changes = check_graphs(stage, latter, recaptures)
    wait_for_device(stage.device)
    # `always`, because the step that was in flight at the last update belongs to the former policy.
    reports.publish(always=True)
    counted = reports.log()
    seconds = None
    if changes is None:
        try:
            seconds, latter = _capture(stage, latter, reports.reporter.scheduler)
        except ValueError:
            logger.info("Expert policy: no switch; until now%s", counted.removeprefix(","))
            raise
    else:
        stage.graphs.follow(changes)
    wait_for_device(stage.device)
    stage.acting.since_switch.read()
    stage.in_force, stage.last_switch = latter, last_switch
    if stage.trace is not None:
        stage.trace.switch(last_switch.number, latter.given)
    show_plan(latter.plan)
    reports.publish(always=True)
    change = f"{json.dumps(former.given)} -> {json.dumps(latter.given)}"
    change += "" if seconds is None else f" (graphs captured again in {seconds:.1f} s)"
    logger.info("Expert policy switch %d: %s; until now%s", last_switch.number, change, counted.removeprefix(","))
    return seconds


def compare_ranks(reports: Reports) -> None:
    """Compare the selections of all ranks after a forward, if a comparison is due.

    If ranks differ, switch to vanilla, or end the server if the stage `stops`; if no policy selects, only log the
    difference. All ranks compare after the same forward.
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


def _capture(stage: Stage, latter: InForce, scheduler: Any) -> tuple[float, InForce]:
    """Capture all graphs again under the latter policy. Return the seconds, and the policy with the captured sizes.

    If the capture fails, capture the graphs under the active policy, and raise ValueError.
    """
    check_memory(scheduler)  # an access to released memory would end the server
    began, former = time.monotonic(), stage.in_force
    reason = _capture_under(stage, latter, scheduler)
    if reason is None:
        return time.monotonic() - began, stage.in_force
    then = "the previous policy is active again"
    if again := _capture_under(stage, former, scheduler):
        stage.graphs = Graphs(lost=True)
        then += ", without CUDA graphs"
        logger.error("Expert policy: the graphs of the previous policy could not be captured either: %s", again)
    raise ValueError(f"CUDA graphs could not be captured again, {then}: {reason}")


def _capture_under(stage: Stage, in_force: InForce, scheduler: Any) -> str | None:
    """Capture all graphs under a policy (with paged experts, those that fit). Return the error of a failed capture."""
    stage.graphs, stage.in_force = Graphs(), in_force
    try:
        stage.recapture(scheduler, None if stage.paged is None else _find_fits(in_force))
    except Exception as error:
        # Returned as text, because the exception refers to the captured graphs and would keep their memory.
        logger.warning("Expert policy: a capture of CUDA graphs failed\n%s", traceback.format_exc())
        return " ".join(str(error).split())
    return None
