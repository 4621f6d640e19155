"""Counters in the answers of GET and POST: since the start and the switch, by layer, and at most one look a second."""

import pytest

from live.schedulers import REPORTER
from sglang_xshare.stage.record.counters import Counters
from stage.fake import XSHARE, run
from stage.switching import switch


@pytest.fixture
def looks(monkeypatch):
    """What was asked of the device: one entry a look at the counters."""
    found, read = [], Counters.read
    monkeypatch.setattr(Counters, "read", lambda self: found.append(self) or read(self))
    return found


def test_get_counts_by_layer(control):
    asked = control(XSHARE | {"expert_policy_config": {"k0": 1, "add": 2, "layers": {"1": {"policy": "vanilla"}}}})
    run(asked.model, "decode", 4)
    counters = asked.get()["counters"]
    first, vanilla, last = counters["by_layer"]
    assert [layer["layer"] for layer in counters["by_layer"]] == [0, 1, 2]
    assert (first["layer_steps"], vanilla["layer_steps"], first["rows"], vanilla["rows"]) == (1, 0, 4, 0)
    for name in ("experts_before", "experts_after", "kept_mass"):
        assert first[name] + last[name] == pytest.approx(counters[name])


def test_counters_since_the_switch_are_the_plans_own(asked):
    for add, steps in ((1, 1), (2, 3), (3, 6)):
        asked.post({"policy": "xshare", "add": add})
        for _ in range(add):
            run(asked.model, "decode", 12)
        told = asked.get()
        assert told["since_switch"]["outcomes"]["policy"] == add
        assert [layer["layer_steps"] for layer in told["since_switch"]["by_layer"]] == [add] * 3
        counted = [layer["experts_after"] for layer in told["since_switch"]["by_layer"]]
        assert sum(counted) == told["since_switch"]["experts_after"] > 0
        assert told["counters"]["outcomes"]["policy"] == steps


def test_gets_within_a_second_wait_for_the_device_once(asked, clock, looks):
    run(asked.model, "decode", 4)
    first, waits = asked.get(), len(looks)
    assert (first["counters"]["outcomes"]["policy"], first["counted_ago"]) == (1, 0)
    assert waits > 0
    run(asked.model, "decode", 4)
    clock[0] += 0.75
    again = asked.get()
    assert (len(looks), again["counted_ago"]) == (waits, 0.75)
    assert [again[name] for name in ("counters", "since_switch")] == [first["counters"], first["since_switch"]]
    clock[0] += 0.25
    later = asked.get()
    assert (len(looks), later["counters"]["outcomes"]["policy"], later["counted_ago"]) == (2 * waits, 2, 0)


def test_a_switch_and_the_first_get_after_it_count_exactly(asked, clock):
    asked.get()
    run(asked.model, "decode", 4)
    told = asked.post({"policy": "oea", "k0": 1})
    assert (told["counters"]["outcomes"]["policy"], told["since_switch"]["layer_steps"]) == (1, 0)
    run(asked.model, "decode", 4)
    assert asked.get()["since_switch"]["outcomes"]["policy"] == 1


def test_a_fallback_between_two_gets_counts_anew(asked, clock):
    """Ranks that disagree switch without a POST."""
    run(asked.model, "decode", 4)
    asked.get()
    switch(asked.stage, None, REPORTER)
    told = asked.get()
    assert (told["policy"], told["since_switch"]["layer_steps"]) == ("vanilla", 0)
