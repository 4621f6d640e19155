"""Recorded steps, and which of several plans each of them comes from."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from served.answers import LAYERS
from served.eagle import DRAFT_TOKENS, TOP_K
from served.probe import read_logits
from served.ranks import live
from sglang_xshare import Batch, Router, SelectionPlan, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.policies.schedule import Schedule, build_schedule


def schedule_of(keys: Mapping[str, Any], speculative: bool) -> Schedule | None:
    return build_schedule(keys["policy"], {name: keys[name] for name in keys if name != "policy"}, speculative)


def agrees(call: dict[str, Any], schedule: Schedule | None, speculative: bool) -> bool:
    """Whether a recorded call's active experts are this plan's."""
    plan: SelectionPlan | None = None
    phase = "verify" if speculative else "decode"
    if schedule and not schedule.observed and schedule.reason_to_skip(phase, call["rows"]) is None:
        plan = schedule.plan(call["layer"], call["rows"])
    batch = Batch(live(call) if "own" in call else None, DRAFT_TOKENS if speculative else 1)
    selection = select(read_logits(call), plan or VANILLA, Router(TOP_K), batch, backend="torch")
    wanted, found = set(selection.active.nonzero().flatten().tolist()), set(call["active"])
    # A vanilla step's padding rows route as well, an idle rank's by equal logits: to any experts.
    return wanted <= found if plan is None and "own" in call else wanted == found


def read_steps(calls: Sequence[dict[str, Any]]) -> Iterator[list[list[dict[str, Any]]]]:
    """Steps of one scheduler's ranks, each as the calls of its layers, of every rank; drafts and prefills left out."""
    by_rank = defaultdict(list)
    for call in calls:
        if not call["mode"].endswith("_DRAFT"):
            by_rank[call["rank"]].append(call)
    lengths = {len(calls) for calls in by_rank.values()}
    assert len(lengths) == 1, "ranks are in step"
    for first in range(0, lengths.pop(), LAYERS):
        step = [calls[first : first + LAYERS] for calls in by_rank.values()]
        assert all([call["layer"] for call in calls] == list(range(LAYERS)) for calls in step)
        if step[0][0]["mode"] != "EXTEND" and not step[0][0].get("prefills"):
            yield step


def find_wrong(calls: Sequence[dict[str, Any]], schedule: Schedule | None, speculative: bool) -> list[int]:
    """The layers of a step whose active experts are not this plan's."""
    return [call["layer"] for call in calls if not agrees(call, schedule, speculative)]


def check_steps(calls: Sequence[dict[str, Any]], plans: Sequence[Mapping[str, Any]], speculative: bool) -> int:
    """Every step comes from one whole plan, the same on every rank. Returns how often it was another than before."""
    schedules = [schedule_of(keys, speculative) for keys in plans]
    changes = 0
    for step in read_steps(calls):
        for calls_of_rank in step[1:]:
            assert [call["active"] for call in calls_of_rank] == [call["active"] for call in step[0]]
        fits = (number for number, schedule in enumerate(schedules) if not find_wrong(step[0], schedule, speculative))
        found = next(fits, None)
        if found is None:
            told = {name: step[0][0].get(name) for name in ("mode", "rows", "own", "padded")}
            wrong = [(one and one.given, find_wrong(step[0], one, speculative)) for one in schedules]
            pytest.fail(f"a step of no plan: {told}; layers that differ: {wrong}")
        schedules.insert(0, schedules.pop(found))  # the one of the last step is tried first
        changes += found > 0
    return changes
