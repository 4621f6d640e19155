"""The releases between those of the other tests: each serves a policy, and answers as SGLang does without one."""

import pytest

from served.answers import policy

FULL, SMALL = 16, 8
"""Requests at once: at full budget, and at one that drops experts."""


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22"])
def test_a_policy_is_served(release, asked, served):
    flags = policy("xshare", k0=1, add=8, by_rows={str(FULL): {"add": 64, "utility": "full"}})
    answers = asked(*flags, release=release, sizes=(FULL, SMALL))
    assert answers.tokens[0] == served("unpatched").tokens[0]
    calls = answers.calls("DECODE", SMALL, SMALL)
    assert all(call["after"] <= call["rows"] + 8 for call in calls)
    assert sum(call["after"] for call in calls) < sum(call["before"] for call in calls)
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2)
