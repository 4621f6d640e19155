"""Fixtures of the live control's tests: the stage's fake model, the stage around it, a server for the subcommands."""

from contextlib import ExitStack
from threading import Thread
from types import SimpleNamespace

import pytest

from live.fake import FakeServer
from stage.conftest import attach

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

        def serve(body: bytes) -> FakeServer:
            server = stack.enter_context(FakeServer((200, body)))
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield serve
