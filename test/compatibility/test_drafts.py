"""Draft depths by tokens per second: wrong flags, one line each, before weights load."""

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
    }
    return SimpleNamespace(**flags | given)


def refuse(**given: Any) -> str:
    with pytest.raises(ExpertPolicyError) as refusal:
        check_depth(arguments(**given))
    line = str(refusal.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"expert_policy_draft_depth": "deep"},
            "--expert-policy-draft-depth deep: must be throughput or upstream",
        ),
        (
            {"speculative_adaptive": False},
            "--expert-policy-draft-depth throughput: needs --speculative-adaptive",
        ),
        (
            {"expert_policy_draft_depth": "upstream", "speculative_adaptive": False},
            "--expert-policy-draft-depth upstream: needs --speculative-adaptive",
        ),
        (
            {"speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4: must be 1 with --expert-policy-draft-depth throughput",
        ),
        (
            {"speculative_num_steps": 4},
            "--speculative-num-steps 4: must be one of 0, 1, 3, 5, 7 "
            "(the candidates of SGLang without --speculative-adaptive-config)",
        ),
    ],
)
def test_what_leaves_no_depth_to_choose_is_refused(given, line):
    assert refuse(**given) == line


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (None, "must be a JSON file (No such file or directory)"),
        ("{", "must be a JSON file (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[]", 'must be an object like {"1": {"candidate_steps": [1, 3]}}'),
        ("{}", None),
        ('{"1": {}}', None),
        ('{"1": {"candidate_steps": [-1]}}', None),
        ('{"1": {"candidate_steps": 3}}', None),
        ('{"1": 3}', None),
    ],
)
def test_a_configuration_without_candidates_is_refused(text, ends, tmp_path):
    file = tmp_path / "adaptive.json"
    if text is not None:
        file.write_text(text)
    line = refuse(speculative_adaptive_config=str(file))
    assert line.startswith(f"--speculative-adaptive-config {file}: ")
    assert ends is None or line.endswith(ends)


def test_steps_to_start_with_are_candidates_of_the_configuration(tmp_path):
    file = tmp_path / "adaptive.json"
    file.write_text(CONFIG)
    given = {"speculative_adaptive_config": str(file)}
    assert refuse(speculative_num_steps=5, **given).endswith(
        f"must be one of 1, 3, 7 (the candidates of --speculative-adaptive-config {file})"
    )
    check_depth(arguments(speculative_num_steps=7, **given))


def test_an_older_release_has_no_such_policy(monkeypatch):
    monkeypatch.setattr(drafts, "is_release", lambda since: False)
    assert refuse() == (
        "--expert-policy-draft-depth throughput: needs SGLang 0.5.20 or newer; must be upstream on this release"
    )
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


def test_by_default_a_policy_keeps_the_trees_that_sglang_serves_without_adapting():
    check_depth(arguments(expert_policy_draft_depth=None, expert_policy="xshare", speculative_eagle_topk=4))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, True),
        ({"expert_policy_draft_depth": "upstream"}, True),
        ({"expert_policy_draft_depth": None}, False),
        ({"expert_policy_draft_depth": None, "expert_policy": "vanilla"}, False),
        ({"expert_policy_draft_depth": None, "expert_policy": "xshare"}, True),
        ({"expert_policy_draft_depth": None, "expert_policy": "xshare", "speculative_adaptive": False}, False),
    ],
)
def test_checks_of_a_start_are_made_if_it_is_asked_for(given, asked):
    assert is_asked(arguments(**given)) is asked
    assert Start(arguments(**given)).asks(DEPTH) is asked
    assert [check.when for check in CHECKS if check.of == DEPTH] == [GIVEN, GIVEN, RESOLVED]


def test_the_flag_alone_loads_the_checks():
    assert hooks._is_asked(SimpleNamespace(expert_policy_draft_depth="throughput"))
