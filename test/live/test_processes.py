"""POSTs that meet: in one process of the server, and in two, which share no lock but the order of their messages."""

import asyncio
from typing import Any

import pytest

from live.schedulers import OEA, fail_once
from live.test_control import control
from live.test_replicas import two
from sglang_xshare.live.replicas import Refusal, Replicas

__all__ = ["control", "two"]


def test_two_posts_at_once_do_not_interleave(two):
    async def post_both() -> list[Any]:
        posts = (two.replicas.switch(body | {"after": 1}) for body in (OEA, {"policy": "vanilla"}))
        return list(await asyncio.gather(*posts, return_exceptions=True))

    told, late = asyncio.run(post_both())
    assert (told["policy"], told["switches"]) == ("oea", 2)
    assert str(late).startswith("after = 1: must be 2")
    assert two.schedulers.phases == ["check", "commit", "check"]
    assert two.policies() == ["oea", "oea"]


def test_of_two_processes_that_switch_at_once_one_does(two):
    """As with --tokenizer-worker-num 2, whose processes share no lock. Both checks arrive before either commit."""
    other = Replicas(lambda: two.schedulers)

    async def post_both() -> list[Any]:
        posts = two.replicas.switch(OEA), other.switch({"policy": "vanilla"})
        return list(await asyncio.gather(*posts, return_exceptions=True))

    late, told = asyncio.run(post_both())
    assert two.schedulers.phases[:4] == ["check", "check", "commit", "commit"]
    assert (str(late), late.status) == ("another client switches the policy at the same time; ask again", 400)
    assert (told["policy"], told["switches"]) == ("vanilla", 2)
    assert two.policies() == ["vanilla", "vanilla"]
    assert two.post(OEA)["switches"] == 3


def test_a_refused_check_ends_the_switch_of_another_process_on_all(two):
    """Else the scheduler that refuses the check alone would commit the other switch."""

    def arrive(body: dict[str, Any]) -> None:
        if "commit" in body:
            two.schedulers.hand({"check": {"policy": "nope"}, "epoch": "other"})

    two.schedulers.arrive = arrive
    with pytest.raises(Refusal, match="another client switches"):
        two.post(OEA)
    assert two.policies() == ["xshare", "xshare"]


def test_a_restore_leaves_the_later_switch_of_another_process(two, monkeypatch):
    """It commits between the other's commit, which fails on one scheduler, and its restore."""
    fail_once(monkeypatch, two.both[0], is_late=True)

    def arrive(body: dict[str, Any]) -> None:
        if "restore" in body:
            two.schedulers.arrive = lambda body: None
            for later in ({"check": {"policy": "vanilla"}, "epoch": "later"}, {"commit": "later", "number": 4}):
                assert all(output.success for output in two.schedulers.hand(later))

    two.schedulers.arrive = arrive
    with pytest.raises(Refusal) as raised:
        two.post(OEA)
    assert str(raised.value) == "1 of 2 schedulers: MemoryError: no memory"
    assert two.policies() == ["vanilla", "vanilla"]


@pytest.mark.parametrize("messages", [[], [{"check": OEA, "epoch": "1"}]], ids=["without a check", "another epoch"])
def test_a_commit_that_was_not_checked_is_refused(messages, two):
    states = two.states()
    for body in messages:
        two.schedulers.hand(body)
    for told in two.schedulers.hand({"commit": "2", "number": 2}):
        assert (told.success, told.error) == (False, "another client switches the policy at the same time; ask again")
    assert two.states() == states


def test_a_commit_is_made_once(two):
    two.post(OEA)
    again = two.schedulers.asked[-1]
    two.post({"policy": "vanilla"})
    assert not any(output.success for output in two.schedulers.hand(again))
    assert two.policies() == ["vanilla", "vanilla"]
