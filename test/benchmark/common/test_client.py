"""Running bench_serving over and over from one interpreter, with a stand-in for upstream's."""

from pathlib import Path

import pytest
from common.stand_in import write_stand_in

from benchmark.common.client import Client, Load
from benchmark.common.server import Server


@pytest.fixture
def behave(tmp_path, monkeypatch):
    """Put the stand-in on the path; call it to say how it shall behave."""
    monkeypatch.setenv("PYTHONPATH", str(write_stand_in(tmp_path)))
    return lambda how: monkeypatch.setenv("BEHAVE", how)


def run(client, requests):
    return client.run(Server("model", name="stopped"), Path("tokenizer"), Load(Path("prompts"), requests, 16, 32))


def test_every_run_has_a_process_of_its_own(behave):
    behave("answer")
    with Client() as client:
        first, second = run(client, 3), run(client, 5)
    assert (first["completed"], second["completed"]) == (3, 5)
    assert first["pid"] != second["pid"]
    assert "request_rate" not in first
    log = client.log.read_text()
    assert log.count("prints to its own output") == 2
    assert "--max-concurrency 16" in log


def test_a_failed_run_is_told_with_its_output_and_the_next_one_runs(behave):
    behave("fail")
    with Client() as client:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"against stopped: status 1, 0 of 3 .*(\n.*)*nobody answers"):
                run(client, 3)


def test_unanswered_requests_are_a_failure(behave):
    behave("answer")
    with Client() as client, pytest.raises(RuntimeError, match="status 0, 5 of 6 requests answered"):
        run(client, 6)
