"""Requests that come and go: chunked, mixed and speculative batches answer as one batch of unpatched SGLang does."""

import pytest

from served.answers import FULL
from served.eagle import CHAIN, DRAFT_TOKENS, TREES, eagle, select_again
from served.ranks import PER_REQUEST, XSHARE, keys_of
from served.release import LATEST, OLDEST

CHUNKED = ("--chunked-prefill-size", "32")
MIXED = ("--enable-mixed-chunk", *CHUNKED)


@pytest.mark.parametrize("drafting", [False, pytest.param(True, marks=pytest.mark.long)], ids=["decode", "verify"])
def test_mixed_batches_never_select(drafting, tiny_model, asked):
    """Under speculation a request in a mixed batch advances by one token, without a draft."""
    mode, plan, tokens = ("TARGET_VERIFY", PER_REQUEST, DRAFT_TOKENS) if drafting else ("DECODE", XSHARE, 1)
    answers = asked(*(eagle(tiny_model) if drafting else ()), *keys_of(plan), *MIXED, staggered=True)
    mixed = answers.calls("MIXED", least=2)
    assert mixed
    assert all(call["after"] == call["before"] for call in mixed)
    selecting = answers.calls(mode, least=2)
    assert all(call["active"] == select_again(call, plan, tokens) for call in selecting)
    assert sum(call["after"] for call in selecting) < sum(call["before"] for call in selecting)
    assert answers.metrics["steps prefill"] == answers.forwards("MIXED") + answers.forwards("EXTEND")
    assert answers.metrics["steps policy"] == answers.forwards(mode, least=2) > 0


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
