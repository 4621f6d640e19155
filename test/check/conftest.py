"""Fixtures of the tests of `check`: a model's folder, and a command that does not ask SGLang."""

import json

import pytest
import transformers.modeling_layers  # noqa: F401  # so that `check` need not import it anew in each test

from sglang_xshare.check import command


@pytest.fixture
def write(tmp_path):
    """Call it with a configuration for the folder that holds it."""

    def write_config(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_config


@pytest.fixture
def served(monkeypatch):
    """SGLang is not asked: it would serve."""
    monkeypatch.setattr(command, "_judge", lambda *_: ({"sglang": None, "gpu": "a GPU", "served": True}, None))
