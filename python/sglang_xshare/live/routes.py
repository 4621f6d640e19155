"""GET and POST /expert_policy, in the server's process. What they ask goes to every scheduler by a control message of
upstream's, which each broadcasts to its ranks: all handle it between the same two steps. Who may ask for an answer may
read the policy; who may administer the server, switch it.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.managers.io_struct import DumperControlReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level

from ..policies.keys import read_object
from ..stage.evidence.interval import Interval
from . import METHOD, PATH

COUNTS = ("counters", "since_switch")
MEANS = {
    "mean_before": "experts_before",
    "mean_after": "experts_after",
    "mean_page_ins_before": "page_ins_before",
    "mean_page_ins": "page_ins",
}
"""Means by layer and step, of these totals."""


def add_routes(app: FastAPI, find_manager: Callable[[], Any]) -> None:
    """Add both routes. `find_manager` returns upstream's TokenizerManager, once the server has one."""

    @app.get(PATH)
    @auth_level(AuthLevel.NORMAL)
    async def get_expert_policy() -> Response:
        return _answer(await _ask(find_manager(), {}))

    @app.post(PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def set_expert_policy(request: Request) -> Response:
        try:
            body = read_object(await request.body())
        except ValueError as error:
            return _refuse(str(error))
        return _answer(await _ask(find_manager(), {"post": body}))


async def _ask(manager: Any, body: dict[str, Any]) -> list[Any]:
    """What every scheduler answers: each replica's, and each rank's of data-parallel attention."""
    return list(await manager.dumper_control(DumperControlReqInput(method=METHOD, body=body)))


def _answer(outputs: list[Any]) -> Response:
    refusals = [output.error for output in outputs if not output.success]
    if not refusals:
        return JSONResponse(merge([output.response[0] for output in outputs]))
    if len(refusals) == len(outputs):
        return _refuse(refusals[0])
    return _refuse(f"{len(refusals)} of {len(outputs)} schedulers: {refusals[0]}", 500)


def _refuse(reason: str, status: int = 400) -> Response:
    return JSONResponse({"error": reason}, status)


def merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of several schedulers': counts added up, the policy of one gone back to vanilla by itself, if any."""
    base = max(answers, key=lambda answer: (answer["disagreement"] is not None, answer["switches"]))
    counts = {name: _add_up([answer[name] for answer in answers if answer[name]]) for name in COUNTS}
    return base | counts | {"counted_ago": max(answer["counted_ago"] or 0.0 for answer in answers)}


def _add_up(counts: list[dict[str, Any]]) -> dict[str, Any]:
    names = [one.name for one in fields(Interval) if one.name != "outcomes"]
    totals = {name: sum(one[name] for one in counts) for name in names if counts[0].get(name) is not None}
    outcomes = {name: sum(one["outcomes"][name] for one in counts) for name in counts[0]["outcomes"]}
    interval = Interval(**totals, outcomes=outcomes)
    means = {name: interval.mean(total) for name, total in MEANS.items() if total in totals}
    means |= {name: getattr(interval, name) for name in ("mean_kept_mass", "others_kept_mass")}
    layers = [
        {name: sum(one[name] for one in same) for name in same[0]} | {"layer": same[0]["layer"]}
        for same in zip(*(one.get("by_layer", []) for one in counts), strict=True)
    ]
    return totals | means | {"outcomes": outcomes} | ({"by_layer": layers} if layers else {})
