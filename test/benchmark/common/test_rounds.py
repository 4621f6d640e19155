"""A comparison for real, small: two servers of the trained checkpoint, upstream's bench_serving, one round."""

import psutil
import pytest

from benchmark.common.rounds import Series, Workload, run_rounds, serve
from benchmark.common.variant import parse_variant
from benchmark.quality.served import SERVER_ARGS, measure_nats
from benchmark.quality.text import load_sequences

VARIANTS = [parse_variant(text) for text in ("off", "xshare:k0=1,add=8")]


@pytest.fixture(scope="module")
def measured(tiny_model):
    """The series, the loss of each server, the share of a core the idle one took, and what lives on afterwards."""
    texts = tiny_model / "heldout"
    workload = Workload(tiny_model, texts, rounds=1, requests=16, output_tokens=16)
    tokens = load_sequences(texts, tiny_model, length=48, per_domain=4).tokens
    with serve(tiny_model, VARIANTS, SERVER_ARGS) as servers:
        family = [process for server in servers for process in server.processes()]
        series = [Series(variant) for variant in VARIANTS]
        assert list(run_rounds(workload, series, servers)) == [0]
        idle = servers[0].processes()
        before = cpu_seconds(idle)
        nats = measure_nats(servers[1], tokens, prompt=16, batch=16)
        spent = cpu_seconds(idle) - before
        losses = [measure_nats(servers[0], tokens, prompt=16, batch=16), nats]
    return series, losses, spent, [process for process in family if process.is_running()]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_every_request_is_answered_and_nothing_is_left(measured):
    series, _, _, left = measured
    for one in series:
        assert [result["completed"] for result in one.results] == [16]
        assert one.results[0]["total_output_tokens"] == 16 * 16
    assert left == []


def test_the_policy_is_seen_on_metrics(measured):
    (off, on), *_ = measured
    assert off.evidence[0].policy_steps == 0
    assert off.evidence[0].experts_after is None
    (evidence,) = on.evidence
    assert evidence.policy_steps > 0
    assert 8 <= evidence.experts_after < evidence.experts_before <= 64
    assert 0 < evidence.kept_mass < 1


def test_the_policy_costs_a_little_and_the_trained_model_has_learnt(measured):
    _, (off, on), *_ = measured
    assert not off.isnan().any()
    assert not on.isnan().any()
    assert off.mean() < 4.0  # a guess among 1,024 tokens costs 6.9 nats
    assert 0 < (on - off).abs().mean() < 1.0


def test_an_idle_server_sleeps(measured):
    _, _, spent, _ = measured
    assert spent < 0.5  # seconds of processor time, while the other decoded for longer than that
