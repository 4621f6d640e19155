"""Runs of bench_serving through one worker: one that fails, or is interrupted, costs only itself."""

import subprocess
import sys

import pytest

from benchmark.common import client as client_module
from benchmark.common.client import Client, Load
from benchmark.common.server import Server

WORKER = """
import json, os, signal, sys, time
for line in sys.stdin:
    args = json.loads(line)
    output, prompts = args[args.index("--output-file") + 1], args[args.index("--dataset-path") + 1]
    if prompts != "none answered":
        json.dump({"completed": 4}, open(output, "w"))
    if prompts == "interrupts":
        os.kill(os.getppid(), signal.SIGALRM)
        time.sleep(60)
    print(prompts == "dies" and sys.exit(1) or 0, flush=True)
"""


@pytest.fixture
def client(monkeypatch, tmp_path):
    """One whose worker answers as the prompts' file is called, and which counts those that it has started."""
    monkeypatch.setattr(client_module, "LOGS", tmp_path)
    client = Client()
    client.log.write_text("what it said last")
    client.started = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        client.started.append(subprocess.Popen([sys.executable, "-c", WORKER], **pipes))
        return client.started[-1]

    monkeypatch.setattr(client, "_start", start)
    yield client
    client._stop()


def run(client, prompts, tmp_path):
    return client.run(Server("model"), tmp_path, Load(prompts, requests=4, concurrency=2, output_tokens=8))


def test_one_worker_serves_all_runs(client, tmp_path):
    assert [run(client, "well", tmp_path) for _ in range(3)] == [{"completed": 4}] * 3
    assert len(client.started) == 1


@pytest.mark.parametrize("prompts", ["none answered", "dies"])
def test_the_run_after_one_that_failed_has_a_new_worker(prompts, client, tmp_path):
    with pytest.raises(RuntimeError, match=r"requests answered; the end of .*\nwhat it said last"):
        run(client, prompts, tmp_path)
    assert client.started[0].poll() is not None
    assert run(client, "well", tmp_path) == {"completed": 4}
    assert len(client.started) == 2
