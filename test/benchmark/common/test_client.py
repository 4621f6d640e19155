"""Runs of bench_serving through one worker: a run that fails costs only itself."""

import subprocess
import sys

import pytest

from benchmark.common import client as client_module
from benchmark.common.client import Client
from benchmark.common.rounds import Workload
from benchmark.common.server import Server

WORKER = """
import json, sys
for line in sys.stdin:
    args = json.loads(line)
    output, prompts = args[args.index("--output-file") + 1], args[args.index("--dataset-path") + 1]
    if prompts != "none answered":
        json.dump({"completed": 4}, open(output, "w"))
    print(prompts == "dies" and sys.exit(1) or 0, flush=True)
"""


@pytest.mark.parametrize("fails", ["none answered", "dies"])
def test_one_worker_serves_all_runs_until_one_fails(fails, monkeypatch, tmp_path):
    monkeypatch.setattr(client_module, "LOGS", tmp_path)
    client, started = Client(), []
    client.log.write_text("what it said last")

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", WORKER], **pipes))
        return started[-1]

    def run(prompts):
        return client.run(Server("model"), Workload(tmp_path, tmp_path, requests=4, concurrency=2), prompts)

    monkeypatch.setattr(client, "_start", start)
    try:
        assert [run("well") for _ in range(2)] == [{"completed": 4}] * 2
        assert len(started) == 1
        with pytest.raises(RuntimeError, match=r"requests answered; the end of .*\nwhat it said last"):
            run(fails)
        assert started[0].poll() is not None
        assert run("well") == {"completed": 4}
        assert len(started) == 2
    finally:
        client._stop()
