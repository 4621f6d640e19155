"""The releases between those that every test runs on: each serves a policy, and answers as they do without one."""

import pytest

from served.answers import ask, policy


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.5.18", "0.5.19", "0.5.20", "0.5.22"])
def test_a_policy_is_served(release, patched_release, served, tiny_model, tmp_path):
    tree = patched_release(release)
    budgets = {"full": 64, "small": 8}
    answers = {}
    for name, add in budgets.items():
        (tmp_path / name).mkdir()
        answers[name] = ask(tiny_model, tree, policy("xshare", k0=1, add=add), tmp_path / name, sizes=(16,))
    assert answers["full"].tokens[0] == served("unpatched").tokens[0]
    assert answers["full"].metrics["steps policy"] > 0
    calls = answers["small"].calls("DECODE", least=2)
    assert all(call["after"] <= call["rows"] + 8 for call in calls)
    assert sum(call["after"] for call in calls) < 0.8 * sum(call["before"] for call in calls)
    assert answers["small"].metrics["steps policy"] == answers["small"].forwards("DECODE", least=2)
