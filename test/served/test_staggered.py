"""Requests that come and go: chunked, mixed and speculative batches answer as one batch of unpatched SGLang does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from served.answers import Answers, ask, policy
from served.eagle import CHAIN, DRAFT_TOKENS, TREES, eagle, select_again
from served.release import LATEST, OLDER

CHUNKED = ("--chunked-prefill-size", "32")
MIXED = ("--enable-mixed-chunk", *CHUNKED)
FULL = policy("xshare", k0=1, add=64, utility="full")
XSHARE = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}


@pytest.fixture(scope="session")
def staggered(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Answers]:
    """Call it with flags for the answers of a server whose sixteen requests arrived one after another."""

    @cache
    def run(flags: tuple[str, ...], release: str) -> Answers:
        return ask(
            tiny_model, patched_release(release), flags, tmp_path_factory.mktemp("staggered"), (16,), staggered=True
        )

    return lambda flags, release=LATEST: run(flags, release)


def test_mixed_batches_never_select(staggered):
    answers = staggered((*policy("xshare", k0=1, add=8), *MIXED))
    mixed = answers.calls("MIXED", least=2)
    assert mixed
    assert all(call["after"] == call["before"] for call in mixed)
    decoded = answers.calls("DECODE", least=2)
    assert all(call["active"] == select_again(call, {"policy": "xshare", "k0": 1, "add": 8}) for call in decoded)
    assert sum(call["after"] for call in decoded) < sum(call["before"] for call in decoded)
    assert answers.metrics["steps prefill"] == answers.forwards("MIXED") + answers.forwards("EXTEND")
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2)


@pytest.mark.long
def test_mixed_batches_never_select_under_speculation(tiny_model, staggered):
    """A request in a mixed batch advances by one token, without a draft."""
    answers = staggered((*eagle(tiny_model), "--expert-policy", "xshare:k0=1,add_per_request=4", *MIXED))
    mixed = answers.calls("MIXED", least=2)
    assert mixed
    assert all(call["after"] == call["before"] for call in mixed)
    verified = answers.calls("TARGET_VERIFY")
    assert all(call["active"] == select_again(call, XSHARE, DRAFT_TOKENS) for call in verified)
    assert answers.metrics["steps policy"] == answers.forwards("TARGET_VERIFY") > 0


@pytest.mark.long
@pytest.mark.parametrize("flags", [CHUNKED, (*CHUNKED, "--disable-overlap-schedule"), MIXED], ids=" ".join)
def test_full_budget_answers_as_unpatched(flags, staggered, served):
    answers = staggered((*FULL, *flags))
    assert answers.tokens == served("unpatched").tokens[:1]
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2) > 0
    assert bool(answers.calls("MIXED")) == (flags == MIXED)


@pytest.mark.long
@pytest.mark.parametrize("chunks", [(), MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("flags", [(), FULL], ids=["off", "full budget"])
@pytest.mark.parametrize("shape", [CHAIN, *TREES])
def test_speculation_answers_as_unpatched(shape, flags, chunks, tiny_model, staggered, served):
    answers = staggered((*eagle(tiny_model, shape), *flags, *chunks))
    assert answers.tokens == served("unpatched").tokens[:1]
    sizes = {call["requests"] for call in answers.calls("TARGET_VERIFY")}
    assert len(sizes) > 4, "the requests were staggered"
    assert bool(answers.calls("MIXED")) == bool(chunks)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), FULL], ids=["off", "full budget"])
@pytest.mark.parametrize("shape", [CHAIN, TREES[-1]])
@pytest.mark.parametrize("release", OLDER)
def test_speculation_of_older_releases_answers_as_unpatched(release, shape, flags, tiny_model, staggered, served):
    """Mixed chunks were asked for: 0.5.17 turns them off under speculation, 0.5.21 does not."""
    answers = staggered((*eagle(tiny_model, shape), *flags, *MIXED), release)
    assert answers.tokens == served("unpatched").tokens[:1]
    assert {call["rows"] / call["requests"] for call in answers.calls("TARGET_VERIFY")} == {shape[2]}
    assert bool(answers.calls("MIXED")) == (release != "0.5.17")
