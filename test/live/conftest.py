"""Fixtures of the live control's tests: the stage's fake model, the stage around it, a server for the subcommands."""

from contextlib import ExitStack
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from live.fake import FakeServer
from live.schedulers import Asked, Two
from sglang_xshare import hooks
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.live.control import Control
from sglang_xshare.upstream.batches import read_batches
from stage.conftest import attach
from stage.fake import EXPERTS, TOP_K, XSHARE, Model

__all__ = ["answering", "attach"]


@pytest.fixture
def clock(monkeypatch):
    """The time as `Control` sees it, in a list of one number that a test moves."""
    now = [100.0]
    monkeypatch.setattr("sglang_xshare.live.control.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def answering():
    """Call it with a body for a server that gives it to whoever asks."""
    with ExitStack() as stack:

        def serve(body: Any) -> FakeServer:
            server = stack.enter_context(FakeServer((200, body)))
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield serve


MODEL = MoeModel("path", "FakeMoe", 3, EXPERTS, TOP_K, "softmax", True)
CONFIG: dict[str, Any] = {
    **{"device": "cpu", "ep_size": 1, "dp_size": 1, "init_expert_location": "trivial", "enable_eplb": False},
    **{"ep_num_redundant_experts": 0, "ep_dispatch_algorithm": None, "enable_return_routed_experts": False},
    **{"enable_dp_attention_local_control_broadcast": False, "moe_runner_backend": "auto", "max_running_requests": 16},
    **{"speculative_algorithm": None, "speculative_num_draft_tokens": None, "speculative_adaptive": False},
    "model_path": "path",
}


@pytest.fixture
def control(attach, monkeypatch):
    """Call it with changes to the server's arguments for a server of a fake model's stage."""
    monkeypatch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda: True)
    monkeypatch.setattr("sglang_xshare.stage.switch.show_plan", lambda plan: None)
    for name, value in {
        "is_first_rank": lambda: True,
        "resolved": lambda server_args: server_args,
        "model_config": lambda server_args: None,
        "read_model": lambda loaded, path: MODEL,
    }.items():
        monkeypatch.setattr(f"sglang_xshare.live.control.{name}", value)

    def make(flags: dict[str, Any] = XSHARE, **changes: Any) -> Asked:
        model = Model()
        installed = attach(model, **CONFIG | flags | changes)
        installed.find_batches = partial(read_batches, SimpleNamespace(**CONFIG | changes))
        installed.update_batches()
        reports: Any = hooks._reports
        return Asked(Control(reports, SimpleNamespace(**CONFIG | changes)), model)

    return make


@pytest.fixture
def asked(control):
    """A server of the usual arguments."""
    return control()


@pytest.fixture
def two(control):
    return Two(control(), control())
