"""Draft depths by tokens per second: wrong flags, one line each, before weights load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare import hooks
from sglang_xshare.compatibility import drafts
from sglang_xshare.compatibility.checks import CHECKS, DEPTH, GIVEN, RESOLVED, Start
from sglang_xshare.compatibility.drafts import check_adapts, check_depth, is_asked
from sglang_xshare.refusal import ExpertPolicyError

CONFIG = '{"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1]}}'


def arguments(**given: Any) -> Any:
    flags = {
        **{"expert_policy": None, "expert_policy_draft_depth": "throughput", "speculative_adaptive": True},
        **{"speculative_eagle_topk": 1, "speculative_num_steps": None, "speculative_adaptive_config": None},
        "speculative_algorithm": "EAGLE3",
    }
    return SimpleNamespace(**flags | given)


FILE = {"speculative_adaptive_config": "adaptive.json"}
UNTRIED = {"expert_policy_draft_depth": None, "expert_policy": "xshare", "speculative_num_steps": 4}
REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "another rule": ({"expert_policy_draft_depth": "deep"}, None),
    "drafts that do not adapt": ({"speculative_adaptive": False}, None),
    "upstream's rule without it": ({"expert_policy_draft_depth": "upstream", "speculative_adaptive": False}, None),
    "a tree": ({"speculative_eagle_topk": 2}, None),
    "a depth that SGLang does not try": ({"speculative_num_steps": 4}, None),
    **{
        f"a depth that SGLang does not try, by {drafter}": (UNTRIED | {"speculative_algorithm": drafter}, None)
        for drafter in ("eagle3", "EAGLE", "NEXTN")
    },
    "a depth that the file does not have": ({**FILE, "speculative_num_steps": 5}, CONFIG),
    "an older release": ({}, None),
    "no file": (FILE, None),
    "a torn file": (FILE, "{"),
    "a deeply nested file": (FILE, '{"1":' * 9_999),
    "a file with a long list": (FILE, f'{{"1": {{"candidate_steps": {[-1] * 999}}}}}'),
    **{
        f"a file with {text}": (FILE, text)
        for text in ("[]", "{}", '{"1": 3}', '{"1": {"candidate_steps": [-1]}}', '{"1": {"candidate_steps": [0]}}')
    },
}
"""Flags, and the text of the file of candidates."""


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given, text = REFUSED[case]
    file = folder / FILE["speculative_adaptive_config"]
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    if case == "an older release":
        monkeypatch.setattr(drafts, "is_release", lambda since: False)
    check_depth(arguments(**{name: str(file) if value == file.name else value for name, value in given.items()}))


def test_what_is_served(tmp_path, monkeypatch):
    (tmp_path / "adaptive.json").write_text(CONFIG)
    check_depth(arguments(speculative_adaptive_config=str(tmp_path / "adaptive.json"), speculative_num_steps=7))
    for depth in ("throughput", None):  # with the candidates of SGLang, 0 among them, and the first number left to it
        for breadth in (1, None):
            given = {"expert_policy_draft_depth": depth, "speculative_eagle_topk": breadth}
            check_depth(arguments(expert_policy="xshare", **given))
    # By default a policy keeps the trees that SGLang serves without adapting.
    check_depth(arguments(expert_policy_draft_depth=None, expert_policy="xshare", speculative_eagle_topk=2))
    for given in ({"speculative_eagle_topk": 2}, {"speculative_algorithm": "NGRAM"}):
        check_depth(arguments(**UNTRIED | given))
    monkeypatch.setattr(drafts, "is_release", lambda since: False)
    check_depth(arguments(expert_policy_draft_depth="upstream", speculative_eagle_topk=4, speculative_num_steps=4))


@pytest.mark.parametrize("reason", ["speculative_algorithm=NGRAM (only EAGLE/EAGLE3 are supported)", None])
def test_a_drafter_that_does_not_adapt_is_refused_by_the_reason_of_sglang(reason, monkeypatch):
    from sglang.srt.speculative import adaptive_spec_params

    monkeypatch.setattr(adaptive_spec_params, "adaptive_unsupported_reason", lambda _: reason)
    static = SimpleNamespace(speculative_adaptive=False)
    with pytest.raises(ExpertPolicyError) as refusal:
        check_adapts(arguments(), static)
    told = "SGLang does not adapt the drafts of this server"
    expected = f"--expert-policy-draft-depth throughput: {told}: {reason or 'this server does not speculate'}"
    assert str(refusal.value) == expected
    check_adapts(arguments(), SimpleNamespace(speculative_adaptive=True))
    for asked in (None, "upstream"):
        check_adapts(arguments(expert_policy_draft_depth=asked, expert_policy="xshare"), static)


def test_a_draft_model_that_skips_tokens_is_refused_where_the_depth_may_be_0(monkeypatch):
    monkeypatch.setenv(drafts.SKIPS, "0")
    check_adapts(arguments(), arguments())
    monkeypatch.setenv(drafts.SKIPS, "1")
    check_adapts(arguments(expert_policy_draft_depth="upstream"), arguments(expert_policy_draft_depth="upstream"))
    with pytest.raises(ExpertPolicyError, match=f"^{drafts.SKIPS} 1: must be unset with --expert-policy-draft-depth"):
        check_adapts(arguments(), arguments())


def test_checks_of_a_start_are_made_if_it_is_asked_for():
    alone = {"expert_policy_draft_depth": None}
    for given, asked in (
        ({}, True),
        ({"expert_policy_draft_depth": "upstream"}, True),
        (alone, False),
        (alone | {"expert_policy": "vanilla"}, False),
        (alone | {"expert_policy": "xshare"}, True),
        (alone | {"expert_policy": "xshare", "speculative_adaptive": False}, False),
    ):
        start = arguments(**given)
        assert (given, is_asked(start), Start(start).asks(DEPTH)) == (given, asked, asked)
    assert [check.when for check in CHECKS if check.of == DEPTH] == [GIVEN, GIVEN, RESOLVED]
    assert hooks._is_asked(SimpleNamespace(expert_policy_draft_depth="throughput")), "the flag alone loads them"
