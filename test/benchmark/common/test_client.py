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
    client = Client()
    client.log.write_text("what it said last")

    def run(status, completed):
        def ask(args):
            Path(args[args.index("--output-file") + 1]).write_text(json.dumps({"completed": completed}))
            return status

        monkeypatch.setattr(client, "_ask", ask)
        return client.run(Server("model"), Workload(tmp_path, tmp_path, requests=4), tmp_path)

    assert run("0", 4) == {"completed": 4}
    for status, completed, told in (("0", 3, "status 0, 3"), ("1", 4, "status 1, 0"), ("", 4, "status none, 0")):
        with pytest.raises(RuntimeError, match=rf"{told} of 4 requests answered; the end of .*\nwhat it said last"):
            run(status, completed)
