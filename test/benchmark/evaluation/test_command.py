"""`python -m benchmark.evaluation`: its own task, and what it refuses in one line, without a server or the harness."""

import json

import pytest

from benchmark.common.paths import TEXTS
from benchmark.evaluation import __main__ as command
from benchmark.evaluation import harness
from benchmark.evaluation.tasks.sums import load_sums
from live.conftest import answering
from sglang_xshare.live.client import PolicyError
from sglang_xshare.live.control import NO_STAGE

__all__ = ["answering"]


class KnowsAll:
    """Stands for the harness: every task is one of its own, and answered."""

    def __init__(self, names):
        self.names = names

    def run(self, name, endpoint, limit, shots):
        return harness.Pass([], 0, 1.0)


@pytest.fixture
def server(answering, monkeypatch):
    """One with live control, that serves model `one`."""
    monkeypatch.setattr(command, "Harness", KnowsAll)
    policy = {"in_force": True, "policy": "oea", "k0": 3, "since_switch": {"layer_steps": 0, "outcomes": {}}}
    server = answering(json.dumps(policy).encode())
    server.routes = {"/get_model_info": (200, b'{"model_path": "one"}'), "/generate": (200, b"[]")}
    return server


def test_a_sum_stands_after_a_solved_one():
    rows = load_sums()["test"]
    lines = (TEXTS / "arithmetic.txt").read_text().splitlines()
    assert len(rows) == len(lines) - 1
    for number in (1, 700, len(lines) - 1):
        row = rows[number - 1]
        assert f"{row['question']} {row['answer']}" == f"{lines[number - 1]}\n{lines[number]}"


@pytest.mark.parametrize(
    ("policies", "flags"), [(("off", "oea:k0=3", "xshare"), ["oea:k0=3"]), (("off", "vanilla"), ["observe"])]
)
def test_the_server_starts_with_the_first_policy_that_selects(policies, flags):
    assert command._start_flags(policies) == ["--expert-policy", *flags]


def test_a_server_without_a_policy_is_one_line(server, tmp_path):
    server.answer = 400, json.dumps({"error": NO_STAGE}).encode()
    with pytest.raises(PolicyError, match=r"^http://\S+: this server was started without an expert policy"):
        command.main(["--url", server.url, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["--url", "localhost:30000"], PolicyError, "localhost:30000: no URL"),
        (["--policies", "off", "xshare:k0"], SystemExit, "policy 'xshare:k0'"),
        (["--policies", "off", "oea:k=3"], ValueError, "k = 3: oea has no such key"),
        (["--limit", "0"], SystemExit, r"--limit: must be a whole number above 0 \(got '0'\)"),
        (["--model", "nowhere"], SystemExit, r"must be an existing folder \(got nowhere\)"),
        (["--model", ".", "--url", "http://x"], ValueError, "--model and --url exclude each other"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, error, line, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "Harness", KnowsAll)
    with pytest.raises(error, match=line):
        command.main([*arguments, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
