"""The checks of a start: one list, in one order, from which a server takes the first refusal and `check` all."""

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from served.release import CPU, make_env, older_releases_take_long
from sglang_xshare import hooks
from sglang_xshare.compatibility import checks
from sglang_xshare.compatibility.arguments import Arguments, read_arguments
from sglang_xshare.compatibility.checks import AFFINITY, CHECKS, GIVEN, PLACEMENT, STAGE, Check, Start, set_arguments
from sglang_xshare.patching.tree import PatchError
from sglang_xshare.refusal import ExpertPolicyError

POLICY = SimpleNamespace(expert_policy="xshare")


def refuse(name):
    def run(start):
        raise ExpertPolicyError(f"--{name}", None, "must be none")

    return run


def find(monkeypatch, server_args, *listed, when=(GIVEN,)):
    """The flags refused by these checks."""
    monkeypatch.setattr(checks, "CHECKS", listed)
    start = Start(server_args)
    return [error.flag for phase in when for error in checks.find_refusals(start, phase)]


def test_what_is_set_is_set_after_what_is_given_was_checked(monkeypatch):
    done = []
    for name, what in (("choose_runner", "runner"), ("set_placement", "placement"), ("set_environment", "environment")):
        monkeypatch.setattr(checks, name, lambda *_, what=what: done.append(what))
    monkeypatch.setattr(checks, "CHECKS", (Check("one", GIVEN, STAGE, lambda start: done.append("one")),))
    both = SimpleNamespace(expert_policy="xshare", expert_placement="ep")
    hooks.check_flags(both)
    assert done == ["one", "placement", "runner"]
    hooks.check_server(both)
    assert done == ["one", "placement", "runner", "environment"]
    start = Start(both)
    start.refused.add("placement")
    set_arguments(start)
    assert done[4:] == ["runner"], "`check` goes on after a refusal"
    monkeypatch.setattr(checks, "CHECKS", (Check("one", GIVEN, STAGE, refuse("one")),))
    with pytest.raises(hooks.Refused):
        hooks.check_flags(both)
    assert done[5:] == []
    for flags in ({"expert_policy": "xshare"}, {"expert_placement": "ep"}):
        set_arguments(Start(SimpleNamespace(**flags)))
    assert done[5:] == ["runner", "placement"], "each part sets its own arguments only"


@pytest.mark.parametrize(
    ("architecture", "given", "left"),
    [
        ("KimiK3ForConditionalGeneration", None, "0"),
        ("KimiK3LinearForCausalLM", "1", "0"),
        ("KimiK3LinearForCausalLM", "false", "false"),
        ("Qwen3MoeForCausalLM", None, None),
    ],
)
def test_a_front_that_routes_past_the_router_is_switched_off_and_said_so(
    architecture, given, left, monkeypatch, caplog
):
    monkeypatch.delenv(checks.FRONT, raising=False)
    if given is not None:
        monkeypatch.setenv(checks.FRONT, given)
    start = Start(POLICY)
    start.model = SimpleNamespace(architecture=architecture)
    checks.set_environment(start)
    assert os.environ.get(checks.FRONT) == left
    assert bool(caplog.messages) == (left == "0")
    monkeypatch.delenv(checks.FRONT, raising=False)  # what the code has set, the fixture does not know
    without_policy = Start(SimpleNamespace(expert_placement="ep"))
    without_policy.model = start.model
    checks.set_environment(without_policy)
    assert checks.FRONT not in os.environ


def test_only_the_parts_that_are_asked_for_are_checked(monkeypatch):
    listed = [Check(part, GIVEN, part, refuse(part)) for part in (PLACEMENT, STAGE, AFFINITY)]
    for flags, parts in (
        ({}, []),
        ({"expert_policy": "vanilla", "load_balance_method": "round_robin"}, []),
        ({"expert_policy": "xshare"}, [STAGE]),
        ({"expert_policy": "nope"}, [STAGE]),
        ({"expert_policy_config": {}}, [STAGE]),
        ({"mask_padding_experts": True}, [STAGE]),
        ({"expert_placement": ""}, [PLACEMENT]),
        ({"load_balance_method": "expert_affinity"}, [AFFINITY]),
        ({"expert_affinity_bound": 0.0}, [AFFINITY]),
        ({"expert_placement": "shard", "expert_policy": "oea", "expert_affinity": "t"}, [PLACEMENT, STAGE, AFFINITY]),
    ):
        assert (flags, find(monkeypatch, SimpleNamespace(**flags), *listed)) == (flags, [f"--{part}" for part in parts])
        if parts:
            with pytest.raises(hooks.Refused, match=f"^--{parts[0]}: "):
                hooks.check_flags(SimpleNamespace(**flags))


def test_a_refused_policy_is_checked_as_any_would_be():
    """`check` goes on after it: what else is wrong is wrong with every policy."""
    start = Start(SimpleNamespace(expert_policy="nope"))
    assert start.arguments == Arguments(None)
    (policy,) = (check for check in CHECKS if check.name == "policy")
    with pytest.raises(ExpertPolicyError, match=r"^--expert-policy nope: "):
        policy.run(start)


def test_a_refused_affinity_is_refused_once():
    """A check that reads the refused table again would report the same line at its own point of the start."""
    start = Start(SimpleNamespace(load_balance_method="round_robin", expert_affinity_bound=0.0))
    found = [[str(error) for error in checks.find_refusals(start, when)] for when in (GIVEN, checks.RESOLVED)]
    assert [len(lines) for lines in found] == [1, 0]


def test_the_flag_that_needs_the_patches_is_named(monkeypatch):
    """`patching/test_engine.py` has the trees that are refused."""

    def refuse_tree() -> None:
        raise PatchError("SGLang is unpatched; run ...")

    monkeypatch.setattr(checks, "check_patched", refuse_tree)
    listed = {check.name: check.run for check in CHECKS if check.when == GIVEN}
    for name, flags, named in (
        ("tree", {"expert_policy": "xshare"}, "--expert-policy"),
        ("tree", {"mask_padding_experts": True}, "--mask-padding-experts"),
        ("affinity's tree", {}, "--load-balance-method expert_affinity"),
        ("depth's tree", {}, "--expert-policy-draft-depth"),
    ):
        with pytest.raises(ExpertPolicyError, match=f"^{named}: SGLang is unpatched"):
            listed[name](Start(SimpleNamespace(**flags)))


def test_a_policys_file_is_read_once(monkeypatch):
    """It may be edited while a server starts, or be a pipe: all processes have the keys that the first one has read."""
    reader, writer = os.pipe()
    os.write(writer, b'{"k0": 1, "add": 4}')
    os.close(writer)
    server_args = SimpleNamespace(expert_policy="xshare", expert_policy_config=f"/dev/fd/{reader}")
    names = ("policy", "policy again")
    monkeypatch.setattr(checks, "CHECKS", [check for check in CHECKS if check.name in names])
    monkeypatch.setattr(checks, "choose_runner", lambda *_: None)
    monkeypatch.setattr(checks, "set_environment", lambda *_: None)
    hooks.check_flags(server_args)
    hooks.check_server(server_args)
    assert read_arguments(pickle.loads(pickle.dumps(server_args))).schedule.keys == {"k0": 1, "add": 4}
    os.close(reader)


@older_releases_take_long
def test_sglangs_record_takes_the_keys_to_other_processes(release, patched_release, tiny_model, tmp_path):
    code = (
        "import pickle, sys; from pathlib import Path; from sglang.srt.server_args import prepare_server_args; "
        "from sglang_xshare.compatibility.arguments import read_arguments; "
        "record = prepare_server_args(sys.argv[1:]); getattr(record, 'resolve_once', int)(); "
        "Path(sys.argv[-1]).unlink(); "
        "assert read_arguments(pickle.loads(pickle.dumps(record))).schedule.keys == {'k0': 1, 'add': 4}"
    )
    (file := tmp_path / "keys.json").write_text('{"k0": 1, "add": 4}')
    flags = ["--model-path", str(tiny_model), *CPU, "--expert-policy", "xshare", "--expert-policy-config", str(file)]
    subprocess.run([sys.executable, "-c", code, *flags], env=make_env(patched_release(release)), check=True)


def test_a_server_without_flags_of_ours_loads_no_check():
    code = (
        "import sys; from types import SimpleNamespace; from sglang_xshare import hooks; "
        "off = SimpleNamespace(expert_policy=None, mask_padding_experts=False, load_balance_method='round_robin'); "
        "hooks.check_flags(off); hooks.check_server(off); assert hooks.capture_sizes(off, [1, 8]) == [1, 8]; "
        "hooks.attach(SimpleNamespace(is_draft_worker=False, server_args=off)); "
        "assert not [name for name in sys.modules if name.startswith('sglang_xshare.compatibility')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
