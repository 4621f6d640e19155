"""Laws of the dispatcher, whatever comes and goes; what it is for; and what it remembers."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinity.tables import TOPICS, make_table, prompt
from sglang_xshare.affinity.centroids import PACE, PRESENT, Centroids, cluster
from sglang_xshare.affinity.decision import REASONS, Affinity, Decision, list_open, price_load
from sglang_xshare.affinity.recent import BLOCK, HASHED, KEYS, Prefixes, Recent, hash_blocks

TABLE = make_table()
UNKNOWN = [64, 65] * BLOCK
"""A prompt of two blocks without a signature: only the cache tells replicas apart."""
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, TOPICS), st.one_of(st.none(), st.integers(0, 2))),
        st.tuples(st.just("end"), st.integers(0, 100), st.none()),
        st.tuples(st.just("alive"), st.integers(1, 2**8 - 1), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.sampled_from([1.0, 1.1, 1.25, 2.0]), EVENTS)
def test_the_bound_holds_and_nobody_idles(replicas, bound, events):
    """Requests come, of a topic or of nothing known, end in any order, and replicas die and come back."""
    affinity, alive = Affinity(TABLE, replicas, bound), list(range(replicas))
    running: dict[int, int] = {}
    for number, (kind, value, key) in enumerate(events):
        if kind == "come":
            loads = [list(running.values()).count(place) for place in range(replicas)]
            assert affinity.loads == loads
            decision = affinity.choose(number, prompt(value, start=number) if value < TOPICS else [64, 65], key=key)
            running[number] = decision.replica
            assert decision.replica in alive
            assert decision.reason in REASONS
            mean = (sum(loads[replica] for replica in alive) + 1) / len(alive)
            assert loads[decision.replica] + 1 <= max(bound * mean, math.ceil(mean)) + 1e-6
            if any(not loads[replica] for replica in alive):
                assert not loads[decision.replica]
        elif kind == "end" and running:
            name = sorted(running)[value % len(running)]
            del running[name]
            affinity.finish(name)
        elif kind == "alive":
            alive = [replica for replica in range(replicas) if value >> replica & 1] or alive
            affinity.set_alive(alive)
            running = {name: replica for name, replica in running.items() if replica in alive}


def test_the_bound_is_reached():
    """Of 63 running on four replicas 1.125 lets one run 18, and 1.1 lets it run 17."""
    assert list_open([17, 16, 15, 15], range(4), 1.125) == [0, 1, 2, 3]
    assert list_open([17, 16, 15, 15], range(4), 1.1) == [1, 2, 3]
    assert list_open([23, 19, 19, 18], range(4), 1.2) == [0, 1, 2, 3]  # 1.2 * 20 is 24 exactly
    assert list_open([114, 95, 95, 95], range(4), 1.15) == [0, 1, 2, 3]  # 1.15 * 100 is 114.99999999999999


def test_a_request_costs_nothing_up_to_the_mean_and_1_at_the_bound():
    assert price_load([15, 16, 17, 19], range(4), 1.2) == pytest.approx([0, 0, 1 / 3.4, 3 / 3.4])  # the mean is 17
    assert price_load([20, 13, 13, 17], range(4), 1.3125) == pytest.approx([1, 0, 0, 0.4])  # 21 is the bound of 16
    assert price_load([2, 1, 1, 1], range(4), 1.5) == pytest.approx([1 / 0.75, 0, 0, 0])
    assert price_load([7, 3], range(2), 1.0) == [0, 0]  # which bound is open to no more than the mean rounded up
    assert price_load([9, 5, 5], [1, 2], 1.2)[1:] == pytest.approx([0, 0])  # the dead count for nothing


@pytest.mark.parametrize("bound", [1.0, 1.1, 1.5])
def test_one_topic_alone_spreads_evenly(bound):
    """Where replicas are alike, none is worth the price of another request, however wide the bound."""
    affinity = Affinity(TABLE, 4, bound)
    for number in range(400):
        affinity.choose(number, prompt(1, start=number), salt=number)
        if number >= 64:
            affinity.finish(number - 64)
    assert sum(affinity.loads) == 64
    assert max(affinity.loads) <= 17


def test_what_nothing_is_known_of_goes_where_least_runs():
    affinity = Affinity(TABLE, 3, 2.0)
    assert [affinity.choose(number, []) for number in range(4)] == [Decision(one, "load") for one in (0, 1, 2, 0)]


def test_of_replicas_that_suit_alike_the_one_that_runs_least_gets_a_request():
    affinity = Affinity(TABLE, 3, 2.0)
    for number, replica in enumerate((0, 0, 1, 2, 2, 2)):
        affinity.choose(number, UNKNOWN, replica=replica)
    # The mean is 7 / 3: another request is free on 0 and 1, and costs something on 2.
    assert affinity.loads == [2, 1, 3]
    assert affinity.choose("next", UNKNOWN) == Decision(1, "affinity")


@pytest.mark.parametrize(("loads", "bound", "reason"), [((1, 0), 2.0, "idle"), ((2, 1), 1.0, "bound")])
def test_a_request_that_another_replica_suits_better_has_the_reason(loads, bound, reason):
    """Replica 0 has the prompt in its cache: it is busy while the other one is idle, or has the most it may run."""
    affinity = Affinity(TABLE, 2, bound)
    for replica, load in enumerate(loads):
        for number in range(load):
            affinity.choose((replica, number), UNKNOWN if replica == 0 else [], replica=replica)
    assert affinity.choose("next", UNKNOWN) == Decision(1, reason)


def test_a_conversation_stays_within_the_bound():
    affinity = Affinity(TABLE, 2, 1.25)
    home = affinity.choose("first", prompt(0), key="chat").replica
    other = affinity.choose("elsewhere", prompt(1)).replica
    assert other != home
    assert affinity.choose("second", prompt(1, start=3), key="chat") == Decision(home, "sticky")
    assert affinity.loads[home] == 2
    assert affinity.choose("third", prompt(0, start=5), key="chat").replica == other


def test_a_session_stays_whatever_runs_and_moves_when_its_replica_dies():
    affinity = Affinity(TABLE, 2, 1.0)
    home = affinity.choose("first", prompt(0), session="s").replica
    for number in range(5):
        assert affinity.choose(number, prompt(1), session="s") == Decision(home, "session")
    affinity.set_alive([1 - home])
    assert affinity.choose("after", prompt(0), session="s").replica == 1 - home
    affinity.set_alive([0, 1])
    assert affinity.choose("last", prompt(0), session="s") == Decision(1 - home, "session")


def test_conversations_push_no_session_out():
    affinity = Affinity(TABLE, 2, 1.0)
    home = affinity.choose("first", prompt(0), session="s").replica
    for number in range(KEYS + 1):
        affinity._homes[number] = 1 - home
    affinity.choose("busy", [], replica=home)
    assert affinity.choose("second", prompt(0), session="s") == Decision(home, "session")


@pytest.mark.parametrize(("caches", "salt", "replica"), [(True, None, 1), (True, "lora", 0), (False, None, 0)])
def test_a_cached_prompt_outweighs_its_topic(caches, salt, replica):
    """A prompt of topic 0 that the replica of topic 1 has in its cache; of another salt it has not. Without caches a
    prompt that comes again goes where its topic is, however often the bound has sent it elsewhere before.
    """
    affinity = Affinity(TABLE, 2, 4.0, caches=caches)
    for number in range(6):
        affinity.choose(number, prompt(0, start=number), replica=0)
        affinity.choose(10 + number, prompt(1, start=number), replica=1)
    long = prompt(0, length=200, start=99)
    affinity.choose("before", long, replica=1)
    assert affinity.choose("again", [*long, 3, 4, 5], salt=salt) == Decision(replica, "affinity")


def test_a_replica_that_dies_loses_what_it_ran_and_its_cache():
    affinity = Affinity(TABLE, 2, 1.1)
    for number in range(8):
        affinity.choose(number, prompt(number % TOPICS, start=number))
    affinity.choose("before", UNKNOWN, replica=0)
    affinity.set_alive([1])
    assert affinity.loads[0] == 0
    assert affinity.choose("one", prompt(0)).replica == 1
    affinity.finish("never came")
    affinity.set_alive([0, 1])
    assert affinity.choose("two", UNKNOWN) == Decision(0, "load")
    affinity.set_alive([])
    with pytest.raises(RuntimeError, match="no replica is alive"):
        affinity.choose("three", prompt(0))
    assert affinity.choose("four", prompt(0), replica=1) == Decision(1, "directed"), "SGLang has sent it already"


def test_a_request_counts_once_and_ends_once():
    affinity = Affinity(TABLE, 2)
    affinity.choose("same", prompt(0))
    affinity.choose("same", prompt(0))
    assert sum(affinity.loads) == 1
    for _ in range(2):
        affinity.finish("same")
        assert affinity.loads == [0, 0]
    for name in ("ends", "stays"):
        affinity.choose(name, prompt(1), replica=0)
    affinity.finish("ends")
    assert affinity._centroids._present[0] == pytest.approx(TABLE.sign(prompt(1))), "what stays is still compared"


@settings(derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5))
def test_the_latest_keys_are_kept(keys, most):
    recent = Recent(most)
    for place, key in enumerate(keys):
        recent[key] = place
    latest = list(dict.fromkeys(reversed(keys)))[:most]
    assert dict(recent) == {key: max(place for place, one in enumerate(keys) if one == key) for key in latest}


@settings(derandomize=True)
@given(st.integers(0, 200), st.integers(0, 200))
def test_the_common_beginning_is_found_by_whole_blocks(length, common):
    common = min(length, common)
    first = list(range(length))
    second = hash_blocks([*first[:common], *(-1 - token for token in first[common:])])
    prefixes = Prefixes(2)
    prefixes.add(0, hash_blocks(first))
    expected = (common // BLOCK) / (length // BLOCK) if length // BLOCK else 0.0
    assert [prefixes.match(replica, second) for replica in range(2)] == [expected, 0]
    prefixes.clear(0)
    assert prefixes.match(0, second) == 0


def test_blocks_of_a_prompt():
    """They are the same however tokens are kept, differ by salt, and are those of a long prompt's beginning."""
    tokens = [1, 2**40, -1, 7] * 20
    assert hash_blocks(tokens) == hash_blocks(array("q", tokens))
    assert len(hash_blocks([2**64 - 1, *tokens])) == 2
    assert not set(hash_blocks(tokens, "one")) & set(hash_blocks(tokens, "two"))
    long = list(range((HASHED + 2) * BLOCK))
    assert (len(hash_blocks(long)), hash_blocks(long)) == (HASHED, hash_blocks(long[: HASHED * BLOCK]))


def test_centroids_begin_as_the_unit_means_of_unlike_samples():
    """The second sample is nearest to the mean of all, and the third is least like it."""
    samples = np.array([[1, 0, 0], [0.7, 0.5**0.5, 0.1], [0, 0, 1]], dtype=np.float32)
    mean = samples[0] + samples[1]
    assert cluster(samples, 2) == pytest.approx(np.stack([mean / np.linalg.norm(mean), samples[2]]), abs=1e-6)
    more = cluster(samples, 5)
    assert more.shape == (5, 3), "samples are repeated"
    assert np.linalg.norm(more, axis=1) == pytest.approx(np.ones(5), abs=0.01)


def test_similarity_is_that_of_what_runs_beside_a_unit_vector_of_what_was_sent():
    centroids = Centroids(np.eye(2, dtype=np.float32), 2)
    signature, past = np.array([0, 1], dtype=np.float32), np.array([1.0, 0.0])

    def compare(running: int) -> list[float]:
        return centroids.compare(signature, np.array([running, 0], dtype=np.float32)).tolist()

    for running in (1, 2, 3):
        centroids.add(0, signature)
        past = (1 - PACE) * past + PACE * signature
        past /= np.linalg.norm(past)
        assert compare(running) == pytest.approx([PRESENT + (1 - PRESENT) * past[1], 1 - PRESENT])
    centroids.remove(0, signature)
    assert compare(2) == pytest.approx([PRESENT + (1 - PRESENT) * past[1], 1 - PRESENT])
    centroids.clear(0)
    assert compare(0) == pytest.approx([(1 - PRESENT) * past[1], 1 - PRESENT])
