"""The simulation: its counts, and what dispatch does in it."""

import random

import pytest
import torch

from affinity.tables import TOPICS, WORDS, make_table, prompt
from benchmark.affinity.live import SERVED, draw_requests, make_key, measure_imbalance
from benchmark.affinity.report import OBSERVE, tabulate_live
from benchmark.affinity.routing import Routing
from benchmark.affinity.simulation import ByAffinity, RoundRobin, make_traffic, simulate
from benchmark.quality.text import Sequences


@pytest.fixture(scope="module")
def routing():
    """Sequences of a topic each, whose tokens use 4 of the topic's 16 experts in a model of one layer."""
    source = random.Random(0)
    topics = [number % TOPICS for number in range(40)]

    def draw(topic):
        return sum(1 << (topic * WORDS + one) for one in source.sample(range(WORDS), 4))

    experts = [[draw(topic) for _ in range(30)] for topic in topics]
    prompts = [prompt(topic, start=number) for number, topic in enumerate(topics)]
    return Routing(prompts, tuple(f"topic {topic}" for topic in topics), experts, 1)


def test_active_experts_are_those_of_the_step(routing):
    members = [(0, 3), (1, 5), (4, 3)]
    expected = routing.experts[0][3] | routing.experts[1][5] | routing.experts[4][3]
    assert (routing.active(members), routing.active([])) == (expected.bit_count(), 0)


def test_fewer_experts_are_active_with_affinity_within_its_bound(routing):
    traffic = make_traffic("mixed", routing.domains, 400)
    turns = simulate(routing, RoundRobin(), 4, traffic)
    narrow = simulate(routing, ByAffinity(make_table(), 4, 1.1), 4, traffic)
    wide = simulate(routing, ByAffinity(make_table(), 4, 1.5), 4, traffic)
    assert wide.active < narrow.active < 0.95 * turns.active
    assert narrow.imbalance <= 1.1
    assert wide.imbalance <= 1.5


def test_imbalance_is_the_mean_over_time():
    spans = [(0, 0.0, 10.0), (0, 0.0, 5.0), (1, 0.0, 10.0), (1, 0.0, 5.0), (0, 5.0, 10.0), (0, 5.0, 10.0)]
    assert measure_imbalance(spans, 2, 0.0, 5.0) == 1.0
    assert measure_imbalance(spans, 2, 5.0, 10.0) == 1.5
    assert measure_imbalance(spans, 2, 0.0, 10.0) == pytest.approx(1.25, abs=0.01)


@pytest.mark.parametrize("traffic", SERVED)
def test_a_request_is_a_sequence_of_its_traffic(traffic):
    domains = tuple(name for name in ("c", "prose") for _ in range(5))
    sequences = Sequences(torch.arange(10 * 20).view(10, 20), domains)
    requests = draw_requests(sequences, 200, life=8, prompt=8, traffic=traffic)
    rows = [request.prompt[0] // 20 for request in requests]
    for row, request in zip(rows, requests, strict=True):
        assert request.prompt + request.text == list(range(20 * row, 20 * row + 8 + len(request.text)))
    assert {len(request.text) for request in requests} == set(range(4, 13))
    shares = [sum(row < 5 for row in rows[start : start + 50]) / 50 for start in (0, 75, 150)]
    wanted = {"mixed": (0.5, 0.5, 0.5), "one-domain": (1, 1, 1), "shift": (1, 0.5, 0), "flood": (0.5, 0.95, 0.5)}
    assert shares == pytest.approx(wanted[traffic], abs=0.2)
    assert draw_requests(sequences, 200, life=8, prompt=8, traffic=traffic) == requests


def test_a_method_is_set_beside_the_first_of_its_traffic_and_policy():
    points = {}
    for policy, method, active, nats, outputs in (
        ("vanilla", "round_robin", 50.0, [1.9, 1.9], "a b"),
        ("xshare", "round_robin", 30.0, [2.0, 2.0], "a b"),
        (OBSERVE, "round_robin", 50.0, [], "a b"),
        ("xshare", "expert_affinity", 27.0, [1.9, 1.9], "a b"),
        (OBSERVE, "expert_affinity", 40.0, [], "a c"),
    ):
        points[make_key("mixed", policy, method)] = {
            **{"traffic": "mixed", "policy": policy, "method": method, "active": active, "nats": nats},
            **{"outputs": outputs, "rows": 15.0, "imbalance": 1.05},
            "shape": {"replicas": 4, "per_replica": 16, "life": 48},
        }
    table = tabulate_live(points)
    assert table.rows[1][5] == f"{40 / 15:.2f} (-20.0%)"
    assert [[*row[1:5], *row[8:]] for row in table.rows] == [
        [OBSERVE, "round_robin", "50.0", "+0.0%", "2 / 2", "-"],
        [OBSERVE, "expert_affinity", "40.0", "-20.0%", "1 / 2", "-"],
        ["vanilla", "round_robin", "50.0", "+0.0%", "-", "+0.0000"],
        ["xshare", "round_robin", "30.0", "+0.0%", "-", "+0.1000 ± 0.0000"],
        ["xshare", "expert_affinity", "27.0", "-10.0%", "-", "+0.0000 ± 0.0000"],
    ]
    assert "24 - 72 tokens" in table.note
    del points[make_key("mixed", "vanilla", "round_robin")]
    assert [row[9] for row in tabulate_live(points).rows[2:]] == ["-", "-"]
