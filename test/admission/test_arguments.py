"""Flags and their errors: one line each, which names the flag, its value and what is allowed."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare.admission.arguments import Arguments, is_on, read_arguments
from sglang_xshare.policies.spelling import SPELLING
from sglang_xshare.refusal import ExpertPolicyError


def read(**flags: Any) -> Arguments | None:
    return read_arguments(SimpleNamespace(**flags))


def test_no_flag_leaves_the_stage_off():
    assert read() is None
    assert read(expert_policy=None, mask_padding_experts=False, speculative_algorithm=None) is None


def test_vanilla_leaves_the_stage_off():
    assert read(expert_policy="vanilla") is None


@pytest.mark.parametrize("mask_padding", [False, True])
@pytest.mark.parametrize("policy", [None, "vanilla", "vanilla:{}", "xshare", "oea:k0=3", "observe"])
def test_whether_the_stage_is_on_is_told_without_parsing(policy, mask_padding):
    flags = {"expert_policy": policy, "mask_padding_experts": mask_padding}
    try:
        assert is_on(SimpleNamespace(**flags)) == (read(**flags) is not None)
    except ExpertPolicyError:  # `is_on` is asked of what was not refused
        assert mask_padding


def test_masking_alone_needs_no_policy():
    arguments = read(mask_padding_experts=True)
    assert arguments == Arguments(schedule=None)


@pytest.mark.parametrize(
    ("algorithm", "keys"), [(None, {"k0": 1, "add": 24}), ("EAGLE3", {"k0": 1, "add": 0, "add_per_request": 4})]
)
def test_bare_xshare_uses_the_published_defaults(algorithm, keys):
    arguments = read(expert_policy="xshare", speculative_algorithm=algorithm)
    assert arguments.schedule.keys == keys


def test_one_key_replaces_all_published_defaults():
    flags = {"expert_policy_config": '{"add_per_request": 5}', "speculative_algorithm": "EAGLE3"}
    schedule = read(expert_policy="xshare", **flags).schedule
    plan = schedule.plan(0, 16)
    assert (plan.add, plan.add_per_request) == (0, 5)


@pytest.mark.parametrize("kind", ["dict", "text", "file"])
def test_config_is_a_dict_or_text_or_a_file(kind, tmp_path):
    keys = {"k0": 2, "add": 12, "min_tokens": 4}
    text = ' {"k0": 2,\n "add": 12, "min_tokens": 4}'
    file = tmp_path / "policy.json"
    file.write_text(text)
    schedule = read(
        expert_policy="xshare", expert_policy_config={"dict": keys, "text": text, "file": str(file)}[kind]
    ).schedule
    assert schedule.keys == {"k0": 2, "add": 12}
    assert schedule.min_tokens == 4


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({"expert_policy": "xshare:k0=2,add=12"}, '{"k0": 2, "add": 12}'),
        ({"expert_policy": 'xshare:{"k0": 2, "add": 12}'}, '{"k0": 2, "add": 12}'),
        ({"expert_policy": "xshare:k0=2", "expert_policy_config": {"min_tokens": 4}}, '{"k0": 2, "min_tokens": 4}'),
        ({"expert_policy": 'xshare:phases=["decode"]'}, '{"phases": ["decode"]}'),
    ],
)
def test_policy_may_be_spelt_with_its_keys(flags, same):
    """As the benchmarks spell it; beside --expert-policy-config where they do not contradict."""
    assert vars(read(**flags).schedule) == vars(read(expert_policy="xshare", expert_policy_config=same).schedule)


def test_vanilla_is_vanilla_however_it_is_spelt():
    assert read(expert_policy="vanilla:{}") is None
    with pytest.raises(ExpertPolicyError, match="vanilla routes as the model does"):
        read(expert_policy="vanilla:{}", expert_policy_align=True)


def test_trace_is_a_file_that_need_not_exist_and_is_not_made_yet(tmp_path):
    file = tmp_path / "trace.jsonl"
    assert read(expert_policy="xshare", expert_policy_trace=str(file)).trace == file
    assert not file.exists()
    file.write_text("earlier\n")
    assert read(expert_policy="xshare", expert_policy_trace=str(file)).trace == file
    assert file.read_text() == "earlier\n"


POLICIES = "vanilla, pruned, dynamic-skip, xshare, oea, lynx-lat, lynx-acc, moe-spec, custom, observe"
COMMON_KEYS = "phases, min_tokens, max_tokens, rows, layers, by_batch"
XSHARE_KEYS = f"k0, p, utility, add, add_per_request, mass, target_per_rank, balance, own_share, {COMMON_KEYS}"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": (
        {"expert_policy": "nope"},
        f"--expert-policy nope: policy = 'nope': allowed is one of {POLICIES}",
    ),
    "misspelt policy": (
        {"expert_policy": "xshere"},
        f"--expert-policy xshere: policy = 'xshere': allowed is one of {POLICIES}; did you mean xshare?",
    ),
    "policy in capitals": (
        {"expert_policy": "XShare"},
        f"--expert-policy XShare: policy = 'XShare': allowed is one of {POLICIES}; did you mean xshare?",
    ),
    "policy in capitals with keys": (
        {"expert_policy": "XShare:k0=1"},
        f"--expert-policy XShare:k0=1: policy 'XShare:k0=1': allowed is {SPELLING}; did you mean xshare?",
    ),
    "policy with a colon and no key": (
        {"expert_policy": "xshare:"},
        f"--expert-policy xshare:: policy 'xshare:': allowed is {SPELLING}",
    ),
    "policy with a key twice": (
        {"expert_policy": "xshare:k0=1,k0=2"},
        f"--expert-policy xshare:k0=1,k0=2: policy 'xshare:k0=1,k0=2': k0 is given twice; allowed is {SPELLING}",
    ),
    "key in both flags": (
        {"expert_policy": "xshare:k0=1,add=24", "expert_policy_config": '{"add": 12}'},
        '--expert-policy xshare:k0=1,add=24 --expert-policy-config {"add": 12}: add = 24 and 12: '
        "allowed is one of the two flags for a key",
    ),
    "vanilla with a key": (
        {"expert_policy": "vanilla:k0=1"},
        "--expert-policy vanilla:k0=1: k0: vanilla has no keys",
    ),
    "misspelt key": (
        {"expert_policy": "xshare:ad=24"},
        f"--expert-policy xshare:ad=24: ad = 24: xshare has no such key; allowed is {XSHARE_KEYS}; did you mean add?",
    ),
    "misspelt common key": (
        {"expert_policy": "oea:by-batch=1"},
        "--expert-policy oea:by-batch=1: by-batch = 1: oea has no such key; "
        f"allowed is k0, p, kmax, max_rank, target_per_rank, own_share, {COMMON_KEYS}; did you mean by_batch?",
    ),
    "policy of another type": (
        {"expert_policy": 3},
        f"--expert-policy 3: policy = 3: allowed is one of {POLICIES}",
    ),
    "unknown key": (
        {"expert_policy": "xshare", "expert_policy_config": '{"nope": 1}'},
        f'--expert-policy xshare --expert-policy-config {{"nope": 1}}: nope = 1: xshare has no such key; '
        f"allowed is {XSHARE_KEYS}",
    ),
    "missing key": (
        {"expert_policy": "dynamic-skip"},
        "--expert-policy dynamic-skip: beta is missing: dynamic-skip needs a number in [0, 1]",
    ),
    "wrong type": (
        {"expert_policy": "oea", "expert_policy_config": '{"k0": "3"}'},
        '--expert-policy oea --expert-policy-config {"k0": "3"}: k0 = \'3\': allowed is an integer of at least 1',
    ),
    "a bool is no integer": (
        {"expert_policy": "xshare", "expert_policy_config": {"add": True}},
        "--expert-policy xshare --expert-policy-config {'add': True}: add = True: allowed is an integer of at least 0",
    ),
    "out of range": (
        {"expert_policy": "xshare", "expert_policy_config": '{"mass": 1.5}'},
        '--expert-policy xshare --expert-policy-config {"mass": 1.5}: mass = 1.5: allowed is a number in (0, 1]',
    ),
    "contradictory keys": (
        {"expert_policy": "lynx-lat", "expert_policy_config": '{"retain": 8, "drop": 2}'},
        '--expert-policy lynx-lat --expert-policy-config {"retain": 8, "drop": 2}: '
        "retain = 8, drop = 2: lynx-lat needs exactly one of them",
    ),
    "vanilla with keys": (
        {"expert_policy": "vanilla", "expert_policy_config": '{"min_tokens": 4}'},
        '--expert-policy vanilla --expert-policy-config {"min_tokens": 4}: min_tokens: vanilla has no keys',
    ),
    "vanilla with masking": (
        {"expert_policy": "vanilla", "mask_padding_experts": True},
        "--mask-padding-experts with --expert-policy vanilla: vanilla routes as the model does; allowed is another "
        "policy",
    ),
    "config without policy": (
        {"expert_policy_config": '{"k0": 1}'},
        '--expert-policy-config {"k0": 1}: allowed only together with --expert-policy',
    ),
    "trace without policy": (
        {"expert_policy_trace": "/tmp/trace"},
        "--expert-policy-trace /tmp/trace: allowed only together with --expert-policy",
    ),
    "no such file": (
        {"expert_policy": "xshare", "expert_policy_config": "/nowhere/policy.json"},
        "--expert-policy-config /nowhere/policy.json: No such file or directory; "
        "allowed is JSON text such as '{\"k0\": 1}' or a JSON file",
    ),
    "a folder": (
        {"expert_policy": "xshare", "expert_policy_config": "/"},
        "--expert-policy-config /: Is a directory; allowed is JSON text such as '{\"k0\": 1}' or a JSON file",
    ),
    "a JSON list": (
        {"expert_policy": "xshare", "expert_policy_config": "[1]"},
        "--expert-policy-config [1]: a JSON list; allowed is one JSON object",
    ),
    "config of another type": (
        {"expert_policy": "xshare", "expert_policy_config": 24},
        "--expert-policy-config 24: of type int; allowed is a dict, JSON text or a JSON file",
    ),
    "trace of vanilla": (
        {"expert_policy": "vanilla", "expert_policy_trace": "/tmp/trace"},
        "--expert-policy-trace /tmp/trace with --expert-policy vanilla: vanilla selects nothing that could be traced; "
        "allowed is another policy",
    ),
    "trace in no folder": (
        {"expert_policy": "xshare", "expert_policy_trace": "/nowhere/trace.jsonl"},
        "--expert-policy-trace /nowhere/trace.jsonl: not writable; allowed is the path of a writable file",
    ),
    "trace is a folder": (
        {"expert_policy": "xshare", "expert_policy_trace": "/"},
        "--expert-policy-trace /: not writable; allowed is the path of a writable file",
    ),
    "moe-spec without speculation": (
        {"expert_policy": "moe-spec", "expert_policy_config": '{"budget": 32}'},
        '--expert-policy moe-spec --expert-policy-config {"budget": 32}: moe-spec without speculative decoding: '
        'it selects in target-verify; allowed is --speculative-algorithm, or phases = ["decode"]',
    ),
    "moe-spec without anything": (
        {"expert_policy": "moe-spec"},
        "--expert-policy moe-spec: budget is missing: moe-spec needs an integer of at least 1; moe-spec without "
        "speculative decoding: it selects in target-verify; allowed is --speculative-algorithm, or phases = "
        '["decode"]',
    ),
    "empty config": (
        {"expert_policy": "xshare", "expert_policy_config": ""},
        "--expert-policy-config '': empty; allowed is JSON text such as '{\"k0\": 1}' or a JSON file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_is_one_exact_line(name):
    flags, line = REFUSED[name]
    with pytest.raises(ExpertPolicyError) as raised:
        read(**flags)
    assert str(raised.value) == line
    assert "\n" not in line


def test_sorted_slots_without_a_policy_are_refused():
    with pytest.raises(ExpertPolicyError, match=r"^--expert-policy-align: allowed only together with --expert-policy$"):
        read(expert_policy_align=True)


@pytest.mark.parametrize("policy", ["vanilla", "observe"])
@pytest.mark.parametrize("flag", ["mask_padding_experts", "expert_policy_align"])
def test_what_would_change_routing_that_is_left_to_the_model_is_refused(policy, flag):
    line = f"--{flag.replace('_', '-')} with --expert-policy {policy}: {policy} routes as the model does; allowed is"
    with pytest.raises(ExpertPolicyError, match=f"^{line} another policy$"):
        read(expert_policy=policy, **{flag: True})


def test_malformed_text_on_two_lines_is_refused_on_one():
    with pytest.raises(ExpertPolicyError) as raised:
        read(expert_policy="xshare", expert_policy_config='{"k0": 1,\n "add"}')
    line = str(raised.value)
    assert line.startswith('--expert-policy-config {"k0": 1, "add"}: malformed JSON (')
    assert line.endswith(": line 2 column 7 (char 16)); allowed is one JSON object")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1, 2]", "a JSON list; allowed is one JSON object"),
        (b"3", "a JSON int; allowed is one JSON object"),
        (b"", "malformed JSON"),
        (b'{"k0": NaN}', "malformed JSON"),
        (b'{"k0": "\xff"}', "malformed JSON"),
        (b'{"k0": 1} {"k0": 1}', "malformed JSON"),
        (b'{"k0": 1, "add": 4, "k0": 2}', "k0 is given twice; allowed is once"),
        (b'{"by_layer": {"1": {"add": 4}, "1": {"add": 5}}}', "1 is given twice; allowed is once"),
    ],
)
def test_file_must_hold_one_object(content, said, tmp_path):
    file = tmp_path / "policy.json"
    file.write_bytes(content)
    with pytest.raises(ExpertPolicyError, match=rf"^--expert-policy-config {re.escape(str(file))}: {said}"):
        read(expert_policy="xshare", expert_policy_config=str(file))


def test_trace_on_a_read_only_file_is_refused(tmp_path, monkeypatch):
    file = Path(tmp_path / "trace.jsonl")
    file.touch()
    # Root may write anywhere, so the answer of a read-only file system is given here.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ExpertPolicyError, match="not writable"):
        read(expert_policy="xshare", expert_policy_trace=str(file))
