"""Requests that come and go: chunked, mixed and speculative batches answer as one batch of unpatched SGLang does."""

import pytest

from served.answers import policy
from served.eagle import CHAIN, DRAFT_TOKENS, TREES, eagle, select_again
from served.release import LATEST, OLDEST

CHUNKED = ("--chunked-prefill-size", "32")
MIXED = ("--enable-mixed-chunk", *CHUNKED)
FULL = policy("xshare", k0=1, add=64, utility="full")
XSHARE = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}


def test_mixed_batches_never_select(asked):
    answers = asked(*policy("xshare", k0=1, add=8), *MIXED, staggered=True)
    mixed = answers.calls("MIXED", least=2)
    assert mixed
    assert all(call["after"] == call["before"] for call in mixed)
    decoded = answers.calls("DECODE", least=2)
    assert all(call["active"] == select_again(call, {"policy": "xshare", "k0": 1, "add": 8}) for call in decoded)
    assert sum(call["after"] for call in decoded) < sum(call["before"] for call in decoded)
    assert answers.metrics["steps prefill"] == answers.forwards("MIXED") + answers.forwards("EXTEND")
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2)


@pytest.mark.long
def test_mixed_batches_never_select_under_speculation(tiny_model, asked):
    """A request in a mixed batch advances by one token, without a draft."""
    flags = (*eagle(tiny_model), "--expert-policy", "xshare:k0=1,add_per_request=4", *MIXED)
    answers = asked(*flags, staggered=True)
    mixed = answers.calls("MIXED", least=2)
    assert mixed
    assert all(call["after"] == call["before"] for call in mixed)
    verified = answers.calls("TARGET_VERIFY")
    assert all(call["active"] == select_again(call, XSHARE, DRAFT_TOKENS) for call in verified)
    assert answers.metrics["steps policy"] == answers.forwards("TARGET_VERIFY") > 0


@pytest.mark.long
@pytest.mark.parametrize("flags", [CHUNKED, (*CHUNKED, "--disable-overlap-schedule"), MIXED], ids=" ".join)
def test_full_budget_answers_as_unpatched(flags, asked, served):
    answers = asked(*FULL, *flags, staggered=True)
    assert answers.tokens == served("unpatched").tokens[:1]
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2) > 0
    assert bool(answers.calls("MIXED")) == (flags == MIXED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("release", "shape", "flags", "chunks"),
    [  # any two of shape, policy and chunks meet; a chain, off and without chunks is in test_speculation.py
        (LATEST, CHAIN, FULL, ()),
        (LATEST, CHAIN, (), MIXED),
        (LATEST, TREES[0], FULL, MIXED),
        (LATEST, TREES[0], (), ()),
        (LATEST, TREES[1], FULL, ()),
        (LATEST, TREES[1], (), MIXED),
        (OLDEST, CHAIN, FULL, MIXED),
        (OLDEST, TREES[1], (), MIXED),
    ],
)
def test_speculation_answers_as_unpatched(release, shape, flags, chunks, tiny_model, asked, served):
    answers = asked(*eagle(tiny_model, shape), *flags, *chunks, release=release, staggered=True)
    assert answers.tokens == served("unpatched").tokens[:1]
    verified = answers.calls("TARGET_VERIFY")
    assert {call["rows"] / call["requests"] for call in verified} == {shape[2]}
    assert release != LATEST or len({call["requests"] for call in verified}) > 4, "the requests were staggered"
    # 0.5.17 turns mixed chunks off under speculation.
    assert bool(answers.calls("MIXED")) == (bool(chunks) and release != OLDEST)
