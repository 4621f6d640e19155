"""Two replicas of one server: a switch is made by both or by none, whatever happens to one of them meanwhile."""

from unittest.mock import Mock

import pytest
import torch

from live.schedulers import OEA, WHICH, XSHARE, fail_once, fall_back
from refused import refused
from sglang_xshare.live.replicas import Replicas, count_switches
from sglang_xshare.policies.exact import Rule

CHECKED, OTHER = {"check": OEA, "epoch": "2"}, "another client switches the policy at the same time; ask again"


def test_a_switch_is_a_check_and_a_commit(two):
    told = two.post(OEA)
    assert two.schedulers.phases == ["check", "commit"]
    assert (told["policy"], told["switches"], len(told["warnings"])) == ("oea", 2, 1)
    assert (two.get()["switches"], two.policies()) == (2, ["oea", "oea"])
    first, second = two.ids()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("gone", [0, 1])
def test_an_after_from_before_a_fallback_is_refused_by_all(gone, two):
    before = two.get()["switches"]
    fall_back(two.both[gone])
    states = two.states()
    told = two.get()
    assert (told["switches"], told["policy"], told["disagreement"]) == (before + 1, "vanilla", WHICH)
    with refused(f"after = {before}") as raised:
        two.post(OEA | {"after": before})
    assert f"must be {before + 1}, the number of switches" in str(raised.value)
    assert two.states() == states
    assert two.post(OEA | {"after": before + 1})["switches"] == before + 2
    assert two.policies() == ["oea", "oea"]
    assert [one.stage.last_switch.number for one in two.both] == [before + 2] * 2
    assert two.get()["disagreement"] is None


def test_each_replicas_fallback_raises_the_number(two):
    numbers = [two.get()["switches"]]
    for one in two.both:
        fall_back(one)
        numbers.append(two.get()["switches"])
    assert numbers == [1, 2, 3]
    with refused("after = 2"):
        two.post(OEA | {"after": 2})
    assert two.post(OEA)["switches"] == 4, "without `after`"
    assert two.policies() == ["oea", "oea"]


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_commit_that_fails_on_one_is_undone_on_all(failing, gone, is_late, two, monkeypatch):
    two.post({"policy": "lynx-lat", "retain": 7, "trial": True})
    fall_back(two.both[gone])
    states, ids, before = two.states(), two.ids(), two.get()["switches"]
    fail_once(monkeypatch, two.both[failing], is_late)
    line = "1 of 2 schedulers: MemoryError: no memory; 2 of 2 restored the previous policy"
    assert (two.refuse(OEA), two.schedulers.phases[-3:]) == ((line, 500), ["check", "commit", "restore"])
    assert two.states() == states
    for former, now in zip(ids, two.ids(), strict=True):
        for one, other in zip(former, now, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    told = two.get()
    assert (told["policy"], told["disagreement"], told["switches"]) == ("vanilla", WHICH, before + 2)
    with refused(f"after = {before}"):
        two.post(OEA | {"after": before})
    assert (two.post(OEA | {"after": before + 2})["switches"], two.policies()) == (before + 3, ["oea", "oea"])
    assert len({one.stage.last_switch.number for one in two.both}) == 1


def test_a_restore_that_fails_is_told(two, monkeypatch):
    fail_once(monkeypatch, two.both[0], is_late=False)
    two.schedulers.arrive["restore"] = lambda: fail_once(monkeypatch, two.both[1], is_late=False)
    failed = "1 of 2 schedulers: MemoryError: no memory"
    assert two.refuse(OEA) == (f"{failed}; the previous policy was not restored: {failed}", 500)
    assert (two.post(OEA)["policy"], two.policies()) == ("oea", ["oea", "oea"])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_check_that_fails_on_one_changes_nothing(failing, two, monkeypatch):
    states = two.states()
    monkeypatch.setattr(two.both[failing].control, "check", lambda *args: 1 / 0)
    assert two.refuse(OEA) == ("1 of 2 schedulers: ZeroDivisionError: division by zero", 500)
    assert (two.schedulers.phases, two.states(), two.get()["switches"]) == (["check"], states, 1)


@pytest.mark.parametrize(("faults", "status"), [((), 400), ((0,), 500), ((1,), 500), ((0, 1), 500)])
def test_a_fault_of_a_scheduler_is_no_refusal_of_the_policy(faults, status, two, monkeypatch):
    """If all schedulers fail, the answer blames the client only if each of them has refused the policy."""
    for number, one in enumerate(two.both):
        error = MemoryError("no memory") if number in faults else ValueError("no such policy")
        monkeypatch.setattr(one.control, "check", Mock(side_effect=error))
    assert two.refuse(OEA)[1] == status


@pytest.mark.parametrize(
    ("failing", "phases"), [("count_switches", ["check"]), ("merge", ["check", "commit", "restore"])]
)
def test_a_process_that_fails_in_between_or_at_the_end_changes_nothing(failing, phases, two, monkeypatch):
    states = two.states()
    with monkeypatch.context() as patch:
        patch.setattr(f"sglang_xshare.live.replicas.{failing}", lambda answers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            two.post(OEA)
    assert (two.schedulers.phases, two.states()) == (phases, states)
    assert two.post(XSHARE)["switches"] == 1 + len(phases), "the lock is free again"


def test_a_fallback_between_check_and_commit_refuses_the_switch(two):
    two.schedulers.arrive["commit"] = lambda: fall_back(two.both[1])
    line = "the policy changed after the check; ask again; 1 of 2 restored the previous policy"
    assert two.refuse(OEA | {"after": 1})[0] == f"1 of 2 schedulers: {line}"
    assert (two.policies(), two.get()["disagreement"]) == (["xshare", "vanilla"], WHICH)


def test_a_trial_keeps_the_rule_for_exact_requests_of_both(two):
    assert two.post(OEA | {"trial": True})["trial"] is two.get()["trial"] is True
    assert [one.stage.in_force.rule for one in two.both] == [Rule(default=True)] * 2
    assert two.post(OEA)["trial"] is False


def test_only_the_first_rank_counts_its_own_switches(two, monkeypatch):
    """Ranks of data-parallel attention fall back together."""
    (one, _) = two.both
    fall_back(one)
    assert one.control.get()["own_switches"] == 1
    monkeypatch.setattr("sglang_xshare.live.control.is_first_rank", lambda: False)
    assert one.control.get()["own_switches"] is None
    assert one.control.get()["counters"] is None, "the first rank's are of all"


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ([(0, 0)], 0),
        ([(4, 1)], 4),
        ([(3, 0), (3, 0)], 3),
        ([(4, 1), (3, 0)], 4),
        ([(3, 0), (4, 1)], 4),
        ([(4, 1), (4, 1)], 5),
        ([(3, 0), (3, None)], 3),
        ([(4, 1), (4, None)], 4),
        ([(4, None), (4, 1)], 4),
        ([(5, 0), (3, 0)], 5),
        ([(5, 0), (4, 1)], 6),
    ],
)
def test_switches_of_the_server(numbers, count):
    """Each replica's (switches, own); own is None for a rank of data-parallel attention that is not the first."""
    answers = [{"switches": switches, "own_switches": own} for switches, own in numbers]
    assert count_switches(answers) == count


def test_two_posts_at_once_do_not_interleave(two):
    told, late = two.post_both(*(two.replicas.switch(body | {"after": 1}) for body in (OEA, {"policy": "vanilla"})))
    assert (told["policy"], told["switches"]) == ("oea", 2)
    assert str(late).startswith("after = 1: must be 2")
    assert (two.schedulers.phases, two.policies()) == (["check", "commit", "check"], ["oea", "oea"])


def test_of_two_processes_that_switch_at_once_one_does(two):
    """As with --tokenizer-worker-num 2, whose processes share no lock. Both checks arrive before either commit."""
    other = Replicas(lambda: two.schedulers)
    late, told = two.post_both(two.replicas.switch(OEA), other.switch({"policy": "vanilla"}))
    assert two.schedulers.phases[:4] == ["check", "check", "commit", "commit"]
    assert (str(late), late.status) == (OTHER, 400)
    assert (told["policy"], told["switches"]) == ("vanilla", 2)
    assert two.policies() == ["vanilla", "vanilla"]
    assert two.post(OEA)["switches"] == 3


def test_a_refused_check_ends_the_switch_of_another_process_on_all(two):
    """Else the scheduler that refuses the check alone would commit the other switch."""
    two.schedulers.arrive["commit"] = lambda: two.schedulers.hand({"check": {"policy": "nope"}, "epoch": "other"})
    assert OTHER in two.refuse(OEA)[0]
    assert two.policies() == ["xshare", "xshare"]


def test_a_restore_leaves_the_later_switch_of_another_process(two, monkeypatch):
    """It commits between the other's commit, which fails on one scheduler, and its restore."""
    fail_once(monkeypatch, two.both[0], is_late=True)

    def switch_again() -> None:
        for later in ({"check": {"policy": "vanilla"}, "epoch": "later"}, {"commit": "later", "number": 4}):
            assert all(output.success for output in two.schedulers.hand(later))

    two.schedulers.arrive["restore"] = switch_again
    assert two.refuse(OEA) == ("1 of 2 schedulers: MemoryError: no memory", 500)
    assert two.policies() == ["vanilla", "vanilla"]


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], OTHER),
        ([CHECKED | {"epoch": "1"}], OTHER),
        ([CHECKED, {"commit": "2", "number": 2}], "the policy changed after the check; ask again"),
    ],
    ids=["without a check", "another epoch", "made already"],
)
def test_a_commit_that_was_not_checked_is_refused(messages, line, two):
    for body in messages:
        two.schedulers.hand(body)
    states = two.states()
    for told in two.schedulers.hand({"commit": "2", "number": 2}):
        assert (told.success, told.error) == (False, line)
    assert two.states() == states
