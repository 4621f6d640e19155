"""Runs of bench_serving: one that some requests have failed is no figure."""

import json
from pathlib import Path

import pytest

from benchmark.common import client as client_module
from benchmark.common.client import Client
from benchmark.common.rounds import Workload
from benchmark.common.server import Server


def test_a_run_with_unanswered_requests_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(client_module, "LOGS", tmp_path)
    client, completed = Client(), [4, 3]
    client.log.write_text("what it said last")

    def ask(args):
        Path(args[args.index("--output-file") + 1]).write_text(json.dumps({"completed": completed.pop(0)}))
        return "0"

    def run():
        return client.run(Server("model"), Workload(tmp_path, tmp_path, requests=4), tmp_path)

    monkeypatch.setattr(client, "_ask", ask)
    assert run() == {"completed": 4}
    with pytest.raises(RuntimeError, match=r"status 0, 3 of 4 requests answered; the end of .*\nwhat it said last"):
        run()
