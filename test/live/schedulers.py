"""A server's process over fake schedulers: every control message reaches all of them in one order, as in SGLang."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import hooks
from sglang_xshare.live import METHOD, control
from sglang_xshare.live.control import Control, handle
from sglang_xshare.live.replicas import Refusal, Replicas
from sglang_xshare.stage.reports import Reports
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.switch import make_next, switch
from stage.fake import Model, make_reporter, run

REPORTER = make_reporter(current_scheduler_metrics_enabled=False)
OEA = {"policy": "oea", "k0": 2}
XSHARE = {"policy": "xshare", "k0": 1, "add": 2, "exact": {"default": True}}
WHICH = "ranks [1] have selected other experts than the first"


class Schedulers:
    """Upstream's TokenizerManager, with a scheduler of each control behind it. `arrive` has a call by the kind of a
    message: it is made before a scheduler handles the message.
    """

    def __init__(self, *controls: Control, reporter: SimpleNamespace = REPORTER) -> None:
        self.controls = controls
        for one in controls:
            one.reports.reporter = reporter
        self.asked: list[dict[str, Any]] = []
        self.arrive: dict[str, Callable[[], object]] = {}

    async def dumper_control(self, request: Any) -> list[Any]:
        assert request.method == METHOD
        self.asked.append(request.body)
        self.arrive.get(self.phases[-1], lambda: None)()
        outputs = self.hand(request.body)
        await asyncio.sleep(0)
        return outputs

    def hand(self, body: dict[str, Any]) -> list[Any]:
        """Every scheduler's answer to a message, which may be another process's."""
        message = SimpleNamespace(method=METHOD, body=body)
        return [handle(one, None, message) for one in self.controls]

    @property
    def phases(self) -> list[str]:
        """The kind of every message so far."""
        return [next(iter(body), "get") for body in self.asked]


class Asked:
    """A server of one scheduler, whose fake model can be run."""

    def __init__(self, control: Control, model: Model) -> None:
        self.control = control
        self.model = model

    @property
    def stage(self) -> Stage:
        return self.control.stage

    def get(self) -> dict[str, Any]:
        """The answer to GET."""
        return asyncio.run(Replicas(lambda: Schedulers(self.control)).get())

    def post(self, body: Mapping[str, Any], reporter: SimpleNamespace = REPORTER) -> dict[str, Any]:
        """The answer to POST. Raises ValueError as the server refuses."""
        return asyncio.run(Replicas(lambda: Schedulers(self.control, reporter=reporter)).switch(dict(body)))

    def decode(self, rows: int = 12) -> list[torch.Tensor | None]:
        """Return the expert ids of each layer in a decode step, None for vanilla."""
        hooks._stage = self.stage
        run(self.model, "decode", rows)
        return [None if routed is None else routed[1] for routed in self.model.routed]


class Two:
    """A server of two replicas, both switched once to XSHARE, and its process."""

    def __init__(self, first: Asked, second: Asked) -> None:
        self.both = first, second
        self.schedulers = Schedulers(first.control, second.control)
        self.replicas = Replicas(lambda: self.schedulers)
        self.post(XSHARE)
        self.schedulers.asked.clear()

    def get(self) -> dict[str, Any]:
        return asyncio.run(self.replicas.get())

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(self.replicas.switch(body))

    def refuse(self, body: dict[str, Any]) -> tuple[str, int]:
        """Return the line and the status with which the server refuses a POST."""
        with pytest.raises(Refusal) as raised:
            self.post(body)
        return str(raised.value), raised.value.status

    def post_both(self, *posts: Coroutine[Any, Any, Any]) -> list[Any]:
        """Return the answers to POSTs that arrive at once, or what they raise."""

        async def gather() -> list[Any]:
            return list(await asyncio.gather(*posts, return_exceptions=True))

        return asyncio.run(gather())

    def states(self) -> list[tuple[Any, ...]]:
        """Return everything that a switch changes in each replica, except its number."""
        controls = [one.control for one in self.both]
        return [
            (one.stage.in_force.given, one.stage.in_force.rule, one.stage.last_switch.disagreement, one.get()["trial"])
            for one in controls
        ]

    def ids(self) -> list[list[torch.Tensor | None]]:
        """Return the expert ids of a decode step of each replica; both have the same logits."""
        return [one.decode() for one in self.both]

    def policies(self) -> list[str]:
        return [one.stage.in_force.given["policy"] for one in self.both]


def fall_back(asked: Asked) -> None:
    """What a replica does whose ranks have disagreed."""
    former = asked.stage.last_switch
    last_switch = replace(former, number=former.number + 1, is_trial=False, disagreement=WHICH)
    switch(asked.control.reports, make_next(asked.stage, None), last_switch)


def fail_once(monkeypatch: pytest.MonkeyPatch, asked: Asked, is_late: bool) -> None:
    """Have the next switch of a replica raise, before or after it has changed what it changes."""

    own = control.switch

    def fail(reports: Reports, *args: Any) -> float | None:
        if reports is not asked.control.reports:
            return own(reports, *args)
        monkeypatch.setattr(control, "switch", own)
        if is_late:
            own(reports, *args)
        raise MemoryError("no memory")

    monkeypatch.setattr(control, "switch", fail)
