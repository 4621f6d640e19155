"""The schedulers of one server: their answers to GET are merged, and all of them make a switch or none does."""

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from uuid import uuid4

from sglang.srt.managers.io_struct import DumperControlReqInput

from ..policies.keys import as_json
from ..stage.record.interval import Interval
from . import FAULT, METHOD

COUNTS = ("counters", "since_switch")
MEANS = {
    "mean_before": "experts_before",
    "mean_after": "experts_after",
    "mean_page_ins_before": "page_ins_before",
    "mean_page_ins": "page_ins",
}
"""The means over layers and steps, each with the name of its total."""


class Refusal(ValueError):
    """The refusal of a request by schedulers, in one line. `status` is the HTTP status of the answer."""

    def __init__(self, line: str, status: int = 400) -> None:
        super().__init__(line)
        self.status = status


class Replicas:
    """The schedulers of one server, which all receive the same messages.

    `find_manager` returns the server's TokenizerManager. SGLang delivers control messages to all schedulers in the same
    order, even if several tokenizer processes send them (`multi_tokenizer_mixin.py`, `data_parallel_controller.py`). So
    two processes that switch at the same time need no common lock. The later check replaces the earlier check on all
    schedulers, and all schedulers refuse the commit of the earlier check.
    """

    def __init__(self, find_manager: Callable[[], Any]) -> None:
        self._find_manager = find_manager
        self._lock = asyncio.Lock()

    async def get(self) -> dict[str, Any]:
        """Return the merged answer of all schedulers. Raises `Refusal` if a scheduler refuses."""
        return merge(await self._ask({}))

    async def switch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Switch all schedulers to the policy in `body`, and return their merged answer.

        All schedulers check the switch before any of them commits it. Raises `Refusal` if one of them refuses. All
        schedulers then have the previous policy, unless the error reports that it was not restored.
        """
        async with self._lock:
            epoch = uuid4().hex
            number = count_switches(await self._ask({"check": body, "epoch": epoch}))
            after = body.get("after", number)
            if type(after) is not int or after != number:  # True == 1
                raise Refusal(f"after = {as_json(after)}: must be {number}, the number of switches so far, or absent")
            try:
                return merge(await self._ask({"commit": epoch, "number": number + 1}))
            except Exception as error:
                restored = await self._restore(epoch, number + 2)
                if not isinstance(error, Refusal):
                    raise
                raise Refusal(f"{error}{restored}", error.status) from None

    async def _restore(self, epoch: str, number: int) -> str:
        """Restore the previous policy on all schedulers that have committed this epoch.

        Return the end of an error line, or "" if there were no such schedulers.
        """
        try:
            answers = await self._ask({"restore": epoch, "number": number})
        except Refusal as error:
            return f"; the previous policy was not restored: {error}"
        restored = sum(answer["restored"] for answer in answers)
        return f"; {restored} of {len(answers)} restored the previous policy" if restored else ""

    async def _ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message to all schedulers, and return the answer of each.

        There is one scheduler for each replica, or for each rank of data-parallel attention. Raises `Refusal` if any
        scheduler refuses. The status is 400 if all schedulers refuse. It is 500 if only some refuse, or if one has an
        internal error.
        """
        outputs = await self._find_manager().dumper_control(DumperControlReqInput(method=METHOD, body=body))
        refusals = [output.error for output in outputs if not output.success]
        if len(refusals) == len(outputs):
            raise Refusal(refusals[0], 500 if any(FAULT in output.response for output in outputs) else 400)
        if refusals:
            raise Refusal(f"{len(refusals)} of {len(outputs)} schedulers: {refusals[0]}", 500)
        return [output.response[0] for output in outputs]


def count_switches(answers: list[dict[str, Any]]) -> int:
    """Return the number of switches of a server.

    This is the number of the last switch by a POST, plus the switches that replicas have made by themselves since then.
    """
    # All ranks of data-parallel attention switch to vanilla together, so only the first rank's number is added.
    first = [answer for answer in answers if answer["own_switches"] is not None]
    own = [int(answer["own_switches"]) for answer in first]
    return max(int(answer["switches"]) - count for answer, count in zip(first, own, strict=True)) + sum(own)


def merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the answers of several schedulers into one, and add up their counts.

    If a replica has switched to vanilla by itself, the result contains the policy of this replica. A server without a
    policy has no counts, so the result is the answer of the first scheduler.
    """
    if "switches" not in answers[0]:
        return answers[0]
    base = max(answers, key=lambda answer: (answer["disagreement"] is not None, answer["switches"]))
    counts = {name: _add_up([answer[name] for answer in answers if answer[name]]) for name in COUNTS}
    merged = base | counts | {"counted_ago": max(answer["counted_ago"] or 0.0 for answer in answers)}
    del merged["own_switches"]
    return merged | {"switches": count_switches(answers)}


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
