"""Flags and their errors: one line each, which names the flag, its value and what is allowed."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compatibility.configured import HIDDEN
from refused import refused
from sglang_xshare.compatibility.arguments import Arguments, is_on, read_arguments
from sglang_xshare.refusal import ExpertPolicyError


def read(**flags: Any) -> Arguments | None:
    return read_arguments(SimpleNamespace(**flags))


def test_no_flag_leaves_the_stage_off_and_masking_alone_needs_no_policy():
    assert read() is None
    assert read(expert_policy=None, mask_padding_experts=False, speculative_algorithm=None) is None
    assert read(expert_policy="vanilla:{}") is None
    assert read(mask_padding_experts=True) == Arguments(schedule=None)


@pytest.mark.parametrize("mask_padding", [False, True])
@pytest.mark.parametrize("policy", [None, "vanilla", "vanilla:{}", "xshare", "oea:k0=3", "observe"])
def test_whether_the_stage_is_on_is_told_without_parsing(policy, mask_padding):
    flags = {"expert_policy": policy, "mask_padding_experts": mask_padding}
    try:
        assert is_on(SimpleNamespace(**flags)) == (read(**flags) is not None)
    except ExpertPolicyError:  # `is_on` is asked of what was not refused
        assert mask_padding
        assert policy in ("vanilla", "vanilla:{}", "observe")


def test_config_is_a_dict_or_text_or_a_file(tmp_path):
    text = ' {"k0": 2,\n "add": 12, "min_rows": 4}'
    (tmp_path / "policy.json").write_text(text)
    for config in ({"k0": 2, "add": 12, "min_rows": 4}, text, str(tmp_path / "policy.json")):
        schedule = read(expert_policy="xshare", expert_policy_config=config).schedule
        assert (schedule.keys, schedule.min_rows) == ({"k0": 2, "add": 12}, 4)


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({"expert_policy": "xshare:k0=2,add=12"}, '{"k0": 2, "add": 12}'),
        ({"expert_policy": 'xshare:{"k0": 2, "add": 12}'}, '{"k0": 2, "add": 12}'),
        ({"expert_policy": "xshare:k0=2", "expert_policy_config": {"min_rows": 4}}, '{"k0": 2, "min_rows": 4}'),
        *(({"expert_policy": 'xshare:phases=["decode"]', **args}, '{"phases": ["decode"]}') for args in ({}, HIDDEN)),
    ],
)
def test_policy_may_be_spelt_with_its_keys(flags, same):
    """As the benchmarks spell it; beside --expert-policy-config where they do not contradict."""
    assert vars(read(**flags).schedule) == vars(read(expert_policy="xshare", expert_policy_config=same).schedule)


def test_trace_is_a_file_that_need_not_exist_and_is_not_made_yet(tmp_path):
    file = tmp_path / "trace.jsonl"
    for earlier in (False, True):
        if earlier:
            file.write_text("earlier\n")
        assert read(expert_policy="xshare", expert_policy_trace=str(file)).trace == file
        assert file.exists() == earlier
    assert file.read_text() == "earlier\n"


def test_a_server_goes_back_to_vanilla_and_hears_its_clients_unless_told_otherwise():
    for flag, stops in ((None, False), ("vanilla", False), ("stop", True)):
        assert read(expert_policy="xshare", expert_policy_on_disagreement=flag).stops is stops
    for ignores in (False, True):
        assert read(expert_policy="xshare", expert_policy_ignore_client_exact=ignores).ignores_exact is ignores


REFUSED: dict[str, dict[str, Any]] = {
    "misspelt policy": {"expert_policy": "xshere"},
    "policy in capitals": {"expert_policy": "XShare"},
    "policy with a key twice": {"expert_policy": "xshare:k0=1,k0=2"},
    "key in both flags": {"expert_policy": "xshare:k0=1,add=24", "expert_policy_config": '{"add": 12}'},
    "vanilla with a key": {"expert_policy": "vanilla:k0=1"},
    "misspelt key": {"expert_policy": "xshare:ad=24"},
    "misspelt common key": {"expert_policy": "oea:by-rows=1"},
    "policy of another type": {"expert_policy": 3},
    "wrong type": {"expert_policy": "oea", "expert_policy_config": '{"k0": "3"}'},
    "a bool is no integer": {"expert_policy": "xshare", "expert_policy_config": {"add": True}},
    "vanilla with keys": {"expert_policy": "vanilla", "expert_policy_config": '{"min_rows": 4}'},
    "config without policy": {"expert_policy_config": '{"k0": 1}'},
    "trace without policy": {"expert_policy_trace": "/tmp/trace"},
    "ignored clients without policy": {"expert_policy_ignore_client_exact": True},
    "ignored clients with masking alone": {"mask_padding_experts": True, "expert_policy_ignore_client_exact": True},
    "disagreement without policy": {"expert_policy_on_disagreement": "stop"},
    "disagreement of another kind": {"expert_policy": "xshare", "expert_policy_on_disagreement": "Stop"},
    "a folder": {"expert_policy": "xshare", "expert_policy_config": "/"},
    "a JSON list": {"expert_policy": "xshare", "expert_policy_config": "[1]"},
    "config of another type": {"expert_policy": "xshare", "expert_policy_config": 24},
    "trace of vanilla": {"expert_policy": "vanilla", "expert_policy_trace": "/tmp/trace"},
    "trace in no folder": {"expert_policy": "xshare", "expert_policy_trace": "/proc/trace.jsonl"},
    "trace is a folder": {"expert_policy": "xshare", "expert_policy_trace": "/"},
    "moe-spec without speculation": {"expert_policy": "moe-spec", "expert_policy_config": '{"budget": 32}'},
    "moe-spec with hidden states alone": {"expert_policy": "moe-spec:budget=32", **HIDDEN},
    "moe-spec without anything": {"expert_policy": "moe-spec"},
    "empty config": {"expert_policy": "xshare", "expert_policy_config": ""},
    "blank config": {"expert_policy": "xshare", "expert_policy_config": "  "},
    **{
        f"mask_padding_experts with {policy}": {"expert_policy": policy, "mask_padding_experts": True}
        for policy in ("vanilla", "vanilla:{}", "observe")
    },
}


def refuse(case: str, *_: Any) -> None:
    read(**REFUSED[case])


TWICE = b'{"k0": 1, "add": 4, "k0": 2}', b'{"by_layer": {"1": {"add": 4}, "1": {"add": 5}}}'


@pytest.mark.parametrize(
    "content", [b"[1, 2]", b"3", b"", b'{"k0": NaN}', b'{"k0": "\xff"}', b'{"k0": 1} {"k0": 1}', *TWICE], ids=repr
)
def test_json_must_be_one_object(content, tmp_path):
    """Only the beginning of the line is compared: the rest is orjson's message."""
    file = tmp_path / "policy.json"
    file.write_bytes(content)
    with refused(f"--expert-policy-config {file}"):
        read(expert_policy="xshare", expert_policy_config=str(file))


def test_json_is_refused_on_one_line():
    with refused('--expert-policy-config {"k0": 1, "add"}'):
        read(expert_policy="xshare", expert_policy_config='{"k0": 1,\n "add"}')


def test_trace_on_a_read_only_file_is_refused(tmp_path, monkeypatch):
    file = Path(tmp_path / "trace.jsonl")
    file.touch()
    # Root may write anywhere, so the answer of a read-only file system is given here.
    monkeypatch.setattr(Path, "open", lambda file, mode: os.open("/proc/none", os.O_WRONLY))
    with refused(f"--expert-policy-trace {file}"):
        read(expert_policy="xshare", expert_policy_trace=str(file))
