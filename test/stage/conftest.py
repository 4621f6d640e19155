"""Fixtures of the stage's tests."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sglang_xshare import hooks
from sglang_xshare.stage.record.figures import PREFIX
from sglang_xshare.upstream.batches import Batches
from stage.fake import Model, bind, make_reporter, runner


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call it with a fake model and server flags to put the stage around it; it is gone after the test."""
    monkeypatch.setattr(hooks, "_stage", None)
    monkeypatch.setattr(hooks, "_reports", None)
    # What these ask of SGLang is tested on every release in test_layer.py and test/served/test_serving.py.
    monkeypatch.setattr("sglang_xshare.upstream.server.show_plan", lambda plan: None)
    monkeypatch.setattr("sglang_xshare.upstream.server.resolved", lambda server_args: server_args)
    monkeypatch.setattr("sglang_xshare.upstream.graphs.list_sizes", lambda *args: [])
    monkeypatch.setattr("sglang_xshare.stage.layer.scales_unnormalized_groups", lambda: False)
    monkeypatch.setattr(
        "sglang_xshare.compatibility.layers.read_layers", lambda model_runner, arguments: bind(model_runner.model)
    )

    def put(model: Model, batches: Batches | None = None, **flags: Any) -> Any:
        monkeypatch.setattr("sglang_xshare.upstream.batches.read_batches", lambda *args, **sizes: batches or Batches())
        model.runner = runner(model, **flags)
        hooks.attach(model.runner)
        return hooks._stage

    return put


@pytest.fixture
def reporter() -> Iterator[SimpleNamespace]:
    """Upstream's, of a server with --enable-metrics; what is registered ends with the test, as what was before."""
    names = REGISTRY._collector_to_names
    for metric in [metric for metric in names if any(name.startswith(PREFIX) for name in names[metric])]:
        REGISTRY.unregister(metric)
    before = set(names)
    yield make_reporter(metrics_collector=SimpleNamespace(labels={"model_name": "fake"}))
    for metric in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(metric)
