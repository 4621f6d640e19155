"""Fixtures of the stage's tests."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from served.release import interpret, run_script
from sglang_xshare import hooks
from sglang_xshare.stage.record.figures import PREFIX
from sglang_xshare.upstream.batches import Batches
from stage.fake import Model, bind, make_reporter, runner, stand_alone


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_alone(monkeypatch)


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call it with a fake model and server flags to put the stage around it; it is gone after the test."""
    monkeypatch.setattr(hooks, "_stage", None)
    monkeypatch.setattr(hooks, "_reports", None)
    stand_alone(monkeypatch)
    monkeypatch.setattr("sglang_xshare.upstream.server.resolved", lambda server_args: server_args)
    monkeypatch.setattr("sglang_xshare.upstream.graphs.list_sizes", lambda *args: [])
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
def build(attach: Callable[..., Any]) -> Callable[..., tuple[Model, Any]]:
    """Call it with a number of layers, and as `attach`, for (a fake model, the stage around it)."""

    def make(num_layers: int = 3, batches: Batches | None = None, **flags: Any) -> tuple[Model, Any]:
        model = Model(num_layers)
        return model, attach(model, batches, **flags)

    return make


@pytest.fixture
def ask(patched_release: Callable[[str], Path]) -> Callable[[str, str], list[dict[str, Any]]]:
    """Call it with the name of a script in this folder and a release for what the script prints on it, in JSON."""
    return lambda script, release: _ask(script, patched_release(release))


@cache
def _ask(script: str, tree: Path) -> list[dict[str, Any]]:
    return run_script(Path(__file__).with_name(script), interpret(tree))


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
