"""A switch to another policy between two steps: check the next value, make graphs follow, assign the value."""

import json
import logging
import time
import traceback
from dataclasses import replace
from typing import Any

from ..policies.exact import Rule
from ..policies.schedule import Schedule
from ..upstream.ranks import is_first_rank
from ..upstream.server import end_server, show_plan, wait_for_device
from .graphs import Graphs, describe_misfits
from .in_force import InForce
from .lane import make_lanes
from .stage import Stage

logger = logging.getLogger(__name__)


def check_switch(
    stage: Stage, schedule: Schedule | None, rule: Rule | None = None, recaptures: bool = True
) -> tuple[InForce, bool]:
    """Return the policy that `switch` would make active, and whether `switch` would capture graphs again. Raises
    ValueError, in one line, if the graphs need a capture that the server cannot do, or `recaptures` does not allow.

    `rule` replaces the schedule's rule for exact requests. Vanilla and `observe` keep the former policy's rule, because
    that policy may come back.
    """
    former = stage.in_force
    if rule is None:
        rule = former.rule if schedule is None or schedule.observed else schedule.exact
    schedule = schedule and schedule.weigh(stage.acceptance.number)
    latter = replace(former, schedule=schedule, rule=rule, is_named=True)
    if former.ranks is not None and schedule is not None:
        latter = replace(latter, ranks=replace(former.ranks, together=schedule.rows == "batch"))
    if latter.given != former.given:  # the same plans keep their lanes: captured graphs write to their counters
        latter = replace(latter, lanes=make_lanes(schedule, stage.acting))
    misfits = {} if schedule is None else stage.graphs.find_misfits(latter)
    if stage.graphs.captured and latter.ranks != former.ranks:
        misfits["the rows that ranks gather change"] = set()
    if misfits and (stage.recapture is None or not recaptures):
        raise ValueError(describe_misfits(misfits, recaptures))
    return latter, bool(misfits)


def switch(
    stage: Stage,
    schedule: Schedule | None,
    reporter: Any,
    number: int = 0,
    rule: Rule | None = None,
    recaptures: bool = True,
) -> float | None:
    """Select by another schedule, None for vanilla, from the next step on. Return the seconds of a capture, None if no
    graph was captured. `number` is the server's number for this switch, 0 for the former number plus one; `rule` and
    `recaptures` are those of `check_switch`.

    Metrics, log and trace (`reporter` as in `Stage.publish`) are updated first, so none of them mixes two policies: the
    host waits for the device twice. Raises ValueError, and keeps the former policy, as `check_switch` does and if the
    capture fails.
    """
    former = stage.in_force
    latter, captures = check_switch(stage, schedule, rule, recaptures)
    wait_for_device(stage.device)
    stage.reports.invalidate()  # the step that was in flight at the last look belongs to the former policy
    counted = stage.report(reporter)
    seconds = None
    if stage.agreement is not None:
        # What is wrong with these plans shows at once. This comes before a capture, which may fail on one rank alone,
        # because all ranks must compare after the same forward.
        stage.agreement.forwards = 0
    if captures:
        seconds = _capture(stage, former, latter)
        latter = stage.in_force  # with the sizes that were captured
    else:
        stage.graphs.follow(latter)
    wait_for_device(stage.device)
    stage.acting.since_switch.read()
    stage.switches = number or stage.switches + 1
    stage.disagreement = None
    stage.in_force = latter
    if stage.trace is not None:
        stage.trace.switch(stage.switches, latter.given)
    show_plan(latter.plan)
    stage.reports.invalidate()
    stage.publish(reporter)
    change = f"{json.dumps(former.given)} -> {json.dumps(latter.given)}"
    again = "" if seconds is None else f" (graphs captured again in {seconds:.1f} s)"
    logger.info("Expert policy switch %d: %s%s; until now%s", stage.switches, change, again, counted.removeprefix(","))
    return seconds


def compare_ranks(stage: Stage) -> None:
    """Compare the selections of all ranks after a forward, if a comparison is due. If ranks differ, switch to vanilla,
    or end the server if the stage `stops`; if no policy selects, log the difference alone. All ranks do so after the
    same forward.
    """
    agreement, in_force = stage.agreement, stage.in_force
    which = [] if agreement is None else agreement.end_forward(in_force.ranks)
    if agreement is None or not which:
        return
    reason = (
        f"ranks {which} have selected other experts than the first: their policies, router logits or placements "
        "differ, and the sum of their outputs was wrong"
    )
    selects = in_force.schedule is not None and not in_force.observes
    then = "vanilla from the next step on" if selects else "no policy is in force"
    log = logger.error if is_first_rank() else logger.debug
    log("Expert policy: %s; %s", reason, "the server ends" if stage.stops else then)
    if stage.stops:
        end_server()
    if selects:
        agreement.counts["fallbacks"] += 1
        switch(stage, None, stage.reports.reporter)
    stage.disagreement = reason


def _capture(stage: Stage, former: InForce, latter: InForce) -> float:
    """Capture all graphs again under the latter policy, and return the seconds. If the capture fails, capture them
    under the former policy, and raise ValueError.
    """
    began = time.monotonic()
    reason = _capture_under(stage, latter)
    if reason is None:
        return time.monotonic() - began
    then = "the previous policy is active again"
    if again := _capture_under(stage, former):
        stage.graphs = Graphs()
        then += ", without CUDA graphs"
        logger.error("Expert policy: the graphs of the previous policy could not be captured either: %s", again)
    raise ValueError(f"CUDA graphs could not be captured again, {then}: {reason}")


def _capture_under(stage: Stage, in_force: InForce) -> str | None:
    """Capture all graphs under a policy, with paged experts those that fit the slots. Return why that failed."""
    assert stage.recapture is not None
    stage.graphs, stage.in_force = Graphs(), in_force
    try:
        stage.recapture(None if stage.paged is None else in_force.fits_slots)
    except Exception as error:
        # As text: a traceback that is kept would keep the memory of the graphs that were captured.
        logger.warning("Expert policy: a capture of CUDA graphs failed\n%s", traceback.format_exc())
        return " ".join(str(error).split())
    return None
