"""Replicas that suit a request alike, the cache that a dead replica loses, and the blocks of a long prompt."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from affinity.tables import make_table
from sglang_xshare.affinity.controller import PREFIX, DecisionCounts
from sglang_xshare.affinity.decision import Affinity, Decision
from sglang_xshare.affinity.recent import BLOCK, HASHED, hash_blocks

TABLE = make_table()
UNKNOWN = [64, 65] * BLOCK
"""A prompt of two blocks without a signature: only the cache tells replicas apart."""


def test_of_replicas_that_suit_alike_the_one_that_runs_least_gets_a_request() -> None:
    affinity = Affinity(TABLE, 3, 2.0)
    for number, replica in enumerate((0, 0, 1, 2, 2, 2)):
        affinity.choose(number, UNKNOWN, replica=replica)
    # The mean is 7 / 3: another request is free on 0 and 1, and costs something on 2.
    assert affinity.loads == [2, 1, 3]
    assert affinity.choose("next", UNKNOWN) == Decision(1, "affinity")


@pytest.mark.parametrize(("loads", "reason"), [((1, 0), "idle"), ((2, 1), "bound")])
def test_a_request_that_another_replica_suits_better_has_the_reason(loads: tuple[int, int], reason: str) -> None:
    """Replica 0 has the prompt in its cache: it is busy while the other one is idle, or has the most it may run."""
    affinity = Affinity(TABLE, 2, 1.0)
    for replica, load in enumerate(loads):
        for number in range(load):
            affinity.choose((replica, number), UNKNOWN if replica == 0 else [], replica=replica)
    assert affinity.choose("next", UNKNOWN) == Decision(1, reason)


def test_a_replica_that_comes_back_has_lost_its_cache() -> None:
    affinity = Affinity(TABLE, 2, 2.0)
    affinity.choose("before", UNKNOWN, replica=1)
    affinity.set_alive([0])
    affinity.set_alive([0, 1])
    assert affinity.choose("after", UNKNOWN) == Decision(0, "load")


def test_of_a_long_prompt_the_first_blocks_are_remembered() -> None:
    tokens = list(range((HASHED + 2) * BLOCK))
    assert len(hash_blocks(tokens)) == HASHED
    assert hash_blocks(tokens) == hash_blocks(tokens[: HASHED * BLOCK])


@pytest.fixture
def _no_metrics_of_others() -> Iterator[None]:
    """Metrics of this test alone: prometheus registers each name once."""
    before = set(REGISTRY._collector_to_names)
    for metric in [one for one in before if any(name.startswith(PREFIX) for name in REGISTRY._collector_to_names[one])]:
        REGISTRY.unregister(metric)
    yield
    for metric in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(metric)


@pytest.mark.usefixtures("_no_metrics_of_others")
def test_metrics_have_what_each_replica_runs_at_the_last_decision() -> None:
    counts = DecisionCounts(2, export=True)
    for loads in ([1, 2], [0, 5]):
        counts.count(Decision(1, "affinity"), loads)
    running = [REGISTRY.get_sample_value(f"{PREFIX}running_requests", {"replica": str(place)}) for place in range(2)]
    assert running == [0, 5]
    labels = {"replica": "1", "reason": "affinity"}
    assert REGISTRY.get_sample_value(f"{PREFIX}requests_total", labels) == 2
