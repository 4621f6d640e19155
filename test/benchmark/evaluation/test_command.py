"""`python -m benchmark.evaluation`: its own task, and what it refuses in one line, without a server or the harness."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmark.common.paths import TEXTS
from benchmark.evaluation import __main__ as command
from benchmark.evaluation import harness, install
from benchmark.evaluation.arms import post_body
from benchmark.evaluation.tasks.sums import load_sums
from sglang_xshare.live.command import PolicyError
from sglang_xshare.live.control import NO_STAGE


class KnowsAll:
    """Stands for the harness: every task is one of its own."""

    def __init__(self, names):
        self.names = names


class Refuses(BaseHTTPRequestHandler):
    """Answers as a server without a policy does."""

    def do_GET(self):
        self.send_response(400)
        self.end_headers()
        self.wfile.write(json.dumps({"error": NO_STAGE}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def without_policy():
    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_sum_stands_after_a_solved_one():
    rows = load_sums()["test"]
    lines = (TEXTS / "arithmetic.txt").read_text().splitlines()
    assert len(rows) == len(lines) - 1
    for number in (1, 700, len(lines) - 1):
        row = rows[number - 1]
        assert f"{row['question']} {row['answer']}" == f"{lines[number - 1]}\n{lines[number]}"


@pytest.mark.parametrize(
    ("policy", "body"),
    [
        ("off", {"policy": "vanilla"}),
        ("vanilla", {"policy": "vanilla"}),
        ("xshare:k0=1,add=6", {"policy": "xshare", "k0": 1, "add": 6}),
    ],
)
def test_what_is_posted(policy, body):
    assert post_body(policy) == body


@pytest.mark.parametrize(
    ("policies", "flags"),
    [(("off", "oea:k0=3", "xshare"), ["oea:k0=3"]), (("off", "vanilla"), ["observe"])],
)
def test_the_server_starts_with_the_first_policy_that_selects(policies, flags):
    assert command._start_flags(policies) == ["--expert-policy", *flags]


def test_a_server_without_a_policy_is_one_line(without_policy, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "Harness", KnowsAll)
    with pytest.raises(PolicyError, match=r"^http://\S+: this server was started without an expert policy; allowed is"):
        command.main(["--url", without_policy, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["--url", "localhost:30000"], PolicyError, "localhost:30000: no URL; allowed is one such as"),
        (["--policies", "off", "xshare:k0"], SystemExit, "policy 'xshare:k0'"),
        (["--policies", "off", "oea:k=3"], ValueError, "k = 3: oea has no such key"),
        (["--limit", "0"], SystemExit, "'0': allowed is a whole number above 0"),
        (["--model", "nowhere"], SystemExit, "nowhere is no folder"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, error, line, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "Harness", KnowsAll)
    with pytest.raises(error, match=line):
        command.main([*arguments, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_without_the_harness_one_line_tells_how_to_get_it(monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^lm-evaluation-harness is not installed here; `python -m benchmark.evaluation"
    ):
        harness.Harness(["gsm8k"])


def test_installed_means_the_pinned_version(monkeypatch):
    pin = install.REQUIREMENTS.read_text().rpartition("==")[2].strip()
    monkeypatch.setattr(install, "version", lambda name: {"lm-eval": pin}[name])
    assert install.is_installed()
    monkeypatch.setattr(install, "version", lambda name: "0.4.0")
    assert not install.is_installed()

    def missing(name):
        raise install.PackageNotFoundError(name)

    monkeypatch.setattr(install, "version", missing)
    assert not install.is_installed()
