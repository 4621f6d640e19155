"""A server's policy while it is searched: whoever else switches it is noticed, and has the last word."""

from unittest.mock import Mock

import pytest

from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.guard import SwitchGuard
from tune.fake import FakeServer, read_found, tune

SWITCHED = "somebody else has switched its policy"


def act_before_a_switch(server, act):
    """Let another client act just before the server gets its next switch."""
    ask = server.set_policy

    def switch(policy):
        server.set_policy = ask
        act()
        return ask(policy)

    server.set_policy = switch


@pytest.mark.parametrize("batch", [1, 2, 9, 40])
def test_another_who_switches_is_noticed_and_has_the_last_word(texts, tmp_path, server, capsys, batch):
    """Whenever it happens, also between two measurements; what was measured before is kept, and nothing after."""
    batches = 0
    other = {"policy": "oea", "k0": 5}

    def intrude(fake):
        nonlocal batches
        batches += 1
        if batches == batch:
            fake.set_policy(other)

    server.intrude = intrude
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4") == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"tune: http://fake: {SWITCHED} (switch ")
    assert f"the same command continues from {tmp_path / 'out'}\n" in out
    assert err.count("\n") == 1
    assert server.policy == server.switched[-1] == other
    assert not (tmp_path / "out" / "plan.json").exists()
    trace = tmp_path / "out" / "trace.jsonl"
    kept = trace.read_text() if trace.exists() else ""
    assert len(kept.splitlines()) == (batch - 1) // 3  # of twelve samples, four at a time
    server.intrude = lambda fake: None
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4") == 0
    assert trace.read_text().startswith(kept)
    assert tune(texts, tmp_path / "alone", "--tolerance", "5%", "--batches", "4") == 0
    assert read_found(tmp_path / "out")[0] == read_found(tmp_path / "alone")[0]


@pytest.mark.parametrize(
    ("error", "captured"),
    [
        (KeyboardInterrupt(), True),
        (PolicyError("no answer (timed out)"), True),
        (KeyboardInterrupt(), False),
        (PolicyError("CUDA graphs could not be captured again", 400), False),
    ],
    ids=repr,
)
def test_a_switch_whose_answer_never_came_is_undone(server, error, captured):
    """The server may have switched, also when Ctrl-C ended the wait; after a failed capture it has switched back."""

    def switch(policy):
        FakeServer.set_policy(server, policy)
        if not captured:
            FakeServer.set_policy(server, trial)
        server.set_policy = lambda policy: FakeServer.set_policy(server, policy)
        raise error

    trial = {"policy": "oea", "k0": 5, "trial": True}
    guard = SwitchGuard(server)
    guard.set_policy(trial)
    server.set_policy = switch
    with pytest.raises(type(error)) as raised:
        guard.set_policy({"policy": "oea", "k0": 3})
    assert str(error) in str(raised.value)
    assert guard.restore()
    assert (server.policy, server.trial) == ({"policy": "xshare"}, False)


def test_what_the_server_refuses_is_told_in_its_own_words(server, monkeypatch):
    guard = SwitchGuard(server)
    monkeypatch.setattr(server, "set_policy", Mock(side_effect=PolicyError("k0 = 99: must be at most 8", 400)))
    with pytest.raises(PolicyError, match=r"^k0 = 99: "):
        guard.set_policy({"policy": "xshare", "k0": 99})


def test_of_two_that_begin_at_once_one_holds_the_server(server):
    """Both have found no trial; the first switches just before the second, twice, as a failed capture counts."""
    first, second = SwitchGuard(server), SwitchGuard(server)
    act_before_a_switch(server, lambda: [first.set_policy({"policy": "oea", "k0": k0}) for k0 in (4, 3)])
    with pytest.raises(PolicyError, match=SWITCHED):
        second.set_policy({"policy": "oea", "k0": 2})
    assert not second.restore()
    assert (server.policy, server.trial) == ({"policy": "oea", "k0": 3}, True)
    first.set_policy({"policy": "oea", "k0": 1})
    assert first.restore()
    assert (server.policy, server.trial) == ({"policy": "xshare"}, False)


def test_what_others_switch_just_before_is_left_so(server):
    """Between a look at the server and the question that follows it."""
    own, ask = {"policy": "oea", "k0": 5}, server.set_policy
    for goes_on in (True, False):
        guard = SwitchGuard(server)
        guard.set_policy({"policy": "oea", "k0": 3})
        act_before_a_switch(server, lambda: ask(own))
        if goes_on:
            with pytest.raises(PolicyError, match=SWITCHED):
                guard.set_policy({"policy": "oea", "k0": 2})
        assert not guard.restore()
        assert (server.policy, server.trial) == (own, False)


def test_a_server_that_only_chooses_the_depth_of_drafts_is_one_line(server, monkeypatch):
    told = {"policy": "vanilla", "in_force": {"policy": "vanilla"}, "draft_depth": {"batch_sizes": []}}
    monkeypatch.setattr(server, "get_policy", lambda: told)
    with pytest.raises(PolicyError, match="started without an expert policy"):
        SwitchGuard(server)


def test_a_trial_is_never_put_back(texts, tmp_path, server, capsys):
    """Two runs side by side: the second begins between two measurements of the first, which ends well."""
    own = {"policy": "oea", "k0": 3}
    server.policy = own
    second: list[int] = []

    def begin(fake):
        fake.intrude = lambda fake: None
        second.append(tune(texts, tmp_path / "second"))

    server.intrude = begin
    assert tune(texts, tmp_path / "first") == 0
    out, err = capsys.readouterr()
    assert second == [1]
    assert err.startswith("tune: http://fake: its policy is another search's trial")
    assert (server.policy, server.trial) == (own, False)
    assert "At the end tune puts back: oea:k0=3\n" in out
    assert "\nPut back: oea:k0=3\n" in out
