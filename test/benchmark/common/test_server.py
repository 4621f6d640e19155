"""The server driver: it starts, tells why it did not, and leaves nothing behind, whatever becomes of its user.

A stand-in for SGLang (a web server and a worker that dies with it, as upstream's do) keeps these fast; the real server
goes through the same driver in every other test that serves.
"""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmark.common import server as server_module
from benchmark.common.paths import ROOT
from benchmark.common.server import Server, ServerError
from programs import write_program

# Has a worker that dies with it, and leaves a temporary file; BEHAVE=exit ends it early, and hang has it never answer.
LAUNCH_SERVER = """
import ctypes, os, signal, subprocess, sys, tempfile, time
from http.server import BaseHTTPRequestHandler, HTTPServer

print("arguments", *sys.argv[1:], flush=True)
if os.environ.get("BEHAVE") == "exit":
    sys.exit("out of experts")
open(os.path.join(tempfile.gettempdir(), "left"), "w").close()
subprocess.Popen(["sleep", "600"], preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
if os.environ.get("BEHAVE") == "hang":
    time.sleep(600)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# text")

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def release(tmp_path):
    """A release tree that holds the stand-in."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCH_SERVER)
    return tmp_path


def start(release, **keys):
    return Server("model", release=release, name="stand-in", **keys)


def test_serves_and_leaves_nothing(release):
    with start(release, args=["--max-total-tokens", "5"]) as server:
        assert server.get("/health") == "# text"
        assert "--max-total-tokens 5" in server.log_text()
        assert "32768" not in server.log_text()
        processes = server.processes()
        assert len(processes) == 2
        scratch = server._scratch.name
        assert os.path.exists(f"{scratch}/left")
    assert not any(process.is_running() for process in processes)
    assert not os.path.exists(scratch)
    server.stop()


def test_a_gpu_can_be_hidden(tmp_path, monkeypatch):
    write_program(tmp_path / "nvidia-smi", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for device, found in (("", True), ("cpu", False)):
        monkeypatch.setenv("SGLANG_XSHARE_DEVICE", device)
        assert server_module.has_gpu.__wrapped__() == found


def test_an_early_exit_is_told_with_status_and_log(release):
    with pytest.raises(ServerError, match="exited with status 1") as failed:
        start(release, env={"BEHAVE": "exit"}).__enter__()
    assert failed.value.returncode == 1
    assert "out of experts" in str(failed.value)
    assert failed.value.log.startswith("arguments --model-path model")


def test_a_passed_deadline_stops_it(release):
    server = start(release, env={"BEHAVE": "hang"}, deadline=1.5)
    server.start()
    while len(server.processes()) < 2:
        time.sleep(0.05)
    processes = server.processes()
    with pytest.raises(ServerError, match="does not answer after"):
        server.wait()
    assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_dies_with_whoever_started_it(release, how):
    script = f"""
import time
from pathlib import Path
from benchmark.common.server import Server
with Server("model", release=Path({str(release)!r})) as server:
    print("session", server._process.pid, flush=True)
    time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    session = next(int(line.split()[1]) for line in driver.stdout if line.startswith("session"))
    family = [psutil.Process(session), *psutil.Process(session).children(recursive=True)]
    assert len(family) == 2
    driver.send_signal(how)
    assert driver.wait(timeout=60) != 0
    assert not psutil.wait_procs(family, timeout=60)[1]
