"""Fixtures of the stage's tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_xshare import stage
from sglang_xshare.stage.layer import Layer
from stage.fake import Model, runner
from stage.release import LATEST
from stage.served import SERVERS, SIZES, Answers, ask


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call it with a fake model and server flags to put the stage around it; it is gone after the test."""
    monkeypatch.setattr(stage, "_stage", None)
    # What these two read from SGLang itself is tested on every release in test_layer.py and test_serving.py.
    monkeypatch.setattr("sglang_xshare.stage.layer.scales_unnormalized_groups", lambda: False)
    monkeypatch.setattr(
        "sglang_xshare.stage.start.layers.find_layers",
        lambda model_runner, arguments: [
            (config, Layer(number, config, None)) for number, config in enumerate(model_runner.model.configs)
        ],
    )

    def put(model: Model, **flags: Any) -> Any:
        stage.attach(runner(model, **flags))
        return stage._stage

    return put


@pytest.fixture(scope="session")
def served(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Answers]:
    """Call it with the name of a server above, or "unpatched", for its answers: every server runs once, and alone."""

    @cache
    def run(name: str, release: str) -> Answers:
        tree = pristine_release(release) if name == "unpatched" else patched_release(release)
        flags = () if name == "unpatched" else SERVERS[name]
        return ask(tiny_model, tree, flags, tmp_path_factory.mktemp("served"), SIZES.get(name, (16, 16, 1)))

    return lambda name, release=LATEST: run(name, release)
