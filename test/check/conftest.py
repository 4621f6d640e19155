"""Fixtures of the tests of `check`: a model's folder, and a command that does not ask SGLang."""

import json

import pytest
import transformers.modeling_layers  # noqa: F401  # so that `check` need not import it anew in each test

from check.asking import QWEN, say
from sglang_xshare.check import command


@pytest.fixture
def write(tmp_path):
    """Call it with a configuration for the folder that holds it."""

    def write_config(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_config


@pytest.fixture
def tell(capsys):
    """Call it with flags for the report of the command, which must end with this exit code."""

    def read_report(*flags, code=0):
        assert say(*flags, "--json") == code
        out, err = capsys.readouterr()
        report = json.loads(out, parse_constant=pytest.fail)
        assert err == "".join(f"check: not answered: {reason}\n" for reason in report["not_answered"])
        return report

    return read_report


@pytest.fixture
def estimate(write, tell):
    """Call it with flags for the estimates of steps of Qwen3-30B-A3B."""
    return lambda *flags: tell("--model", write(QWEN), *flags)["estimate"]["estimates"]


@pytest.fixture
def served(monkeypatch):
    """SGLang is not asked: it would serve."""
    monkeypatch.setattr(command, "_judge", lambda *_: ({"sglang": None, "gpu": "a GPU", "served": True}, None))
