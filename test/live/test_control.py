"""What a scheduler answers to GET and POST: validated as at start-up, and nothing changed by what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from compatibility.configured import HIDDEN
from live.conftest import MODEL
from live.schedulers import OEA, REPORTER, Schedulers, fail_once
from refused import refused
from sglang_xshare import hooks
from sglang_xshare.live import ADDED, METHOD, NO_STAGE
from sglang_xshare.live.replicas import Refusal
from sglang_xshare.policies import list_policies
from sglang_xshare.policies.exact import Rule
from sglang_xshare.policies.keys import as_json
from sglang_xshare.stage.frame import Assignment
from sglang_xshare.stage.paged import SlotsExceeded
from sglang_xshare.stage.step import StepKey
from stage.fake import TOP_K, XSHARE, make_reporter


def test_get_tells_the_plan_and_what_is_counted(control):
    asked = control(XSHARE | {"expert_policy_config": {"k0": 2, "layers": {"1": {"add": 3}}}})
    told = asked.get()
    absent = {"warnings", "recaptured", "recapture_seconds", "draft_depth"}
    assert (set(told), told["in_force"]["mass"]) == ({"policy", "k0", "layers", *ADDED} - absent, 0.93)
    assert {"by_rows": "8-15", "mass": 0.9} in told["in_force"]["overrides"]
    assert told["counters"]["outcomes"]["policy"] == told["switches"] == 0
    for name in (None, "none"):
        assert asked.post({"policy": name})["policy"] == "vanilla"


SETTINGS = [{"policy": policy.name, **setting.keys} for policy in list_policies() for setting in policy.published]
ALONE = {"target_per_rank", "add_per_request"}
WHOLE: list[dict[str, Any]] = [
    *(keys for keys in SETTINGS if not ALONE & set(keys) and keys.get("k0", 0) <= TOP_K),
    *({"policy": "vanilla"}, {"policy": "xshare"}, {"policy": "xshare", "k0": 1, "mass": "careful"}),
    {"policy": "observe", "plans": ["oea:k0=2", {"policy": "xshare", "add": 3}]},
    {"policy": "custom", "k0": 0, "add": 7, "utility": "full"},
    {"policy": "xshare", "k0": 1, "mass": 0.5, "layers": {"0-1": {"k0": 2}}}
    | {"by_rows": {"2-4": {"policy": "vanilla"}}},
]


@pytest.mark.parametrize("keys", WHOLE, ids=str)
def test_what_get_tells_can_be_posted_back(keys, asked):
    if keys["policy"] == "moe-spec":
        keys = {**keys, "phases": ["decode"]}
    told = asked.post(keys)
    assert {key: told[key] for key in keys} == keys
    again = asked.post(asked.get())
    assert (again["in_force"], told["switches"], again["switches"]) == (told["in_force"], 1, 2)


def test_presets_and_the_default_differ_in_their_hash(asked):
    presets = "careful", "default", "fast", 0.93
    hashes = {asked.post({"policy": "xshare", "mass": mass})["plan_hash"] for mass in presets}
    assert len(hashes) == 4
    bare = asked.post({"policy": "xshare"})
    assert (bare["k0"], bare["mass"]) == (1, "default")
    assert bare["plan_hash"] in hashes


def test_a_switch_may_name_the_number_that_it_follows(asked):
    """Of two that have seen the same policy one switches it."""
    assert asked.post({"policy": "oea", "k0": 2, "after": 0})["switches"] == 1
    for after, number in ((0, 1), (2, 1), (None, 1), (True, 1)):
        with refused(f"after = {as_json(after)}") as raised:
            asked.post({"policy": "vanilla", "after": after})
        assert str(raised.value).endswith(f": must be {number}, the number of switches so far, or absent")
    assert asked.get()["policy"] == "oea"
    assert asked.post({"policy": "vanilla", "after": 1})["switches"] == 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "policy must be given"),
    ({"policy": "xhsare"}, "policy = 'xhsare'"),
    ({"policy": "xshare", "k00": 1}, "k00 = 1"),
    ({"policy": "xshare:nope"}, "policy = 'xshare:nope': must be a name"),
    ({"policy": "xshare:k0=1,add=6"}, "policy = 'xshare:k0=1,add=6': must be a name, with its keys beside it$"),
    ({"policy": "xshare", "by_rows": {"2-4": {"policy": "xshare:fast"}}}, "policy = 'xshare:fast': .*\"k0\": 1"),
    ({"policy": "x" * 3_000_000}, "policy = 'xxxx"),
    ({"policy": "xshare", "k0": TOP_K + 1}, f"k0 = {TOP_K + 1}"),
    ({"policy": "xshare", "target_per_rank": 4}, "target_per_rank = 4"),
    ({"policy": "xshare", "add_per_request": 4}, "add_per_request = 4"),
    ({"policy": "moe-spec", "budget": 4}, "moe-spec selects in verify steps only"),
    ({"policy": "xshare", "layers": {"7": {"k0": 2}}}, "layers 7"),
    ({"policy": "xshare", "min_rows": 17}, "min_rows = 17: .*no step of this server has a number of rows in this"),
    ({"policy": "xshare", "recapture": 1}, r"recapture must be true or false \(got 1\)"),
    ({"policy": "xshare", "trial": 1}, r"trial must be true or false \(got 1\)"),
]


@pytest.mark.parametrize(("body", "line"), BAD, ids=[str(body) for body, _ in BAD])
def test_bad_input_gets_one_line_and_changes_nothing(body, line, asked, clock):
    model_plans, before = asked.stage.in_force, asked.get()
    with pytest.raises(ValueError, match=line) as error:
        asked.post(body)
    assert "\n" not in str(error.value)
    assert asked.stage.in_force is model_plans
    assert asked.get() == before


def test_a_policy_of_verify_steps_is_refused_where_sglang_returns_hidden_states_alone(control):
    asked = control(**HIDDEN)
    with pytest.raises(ValueError, match="moe-spec selects in verify steps only"):
        asked.post({"policy": "moe-spec", "budget": 4})
    assert asked.post({"policy": "xshare", "phases": ["decode"]})["switches"] == 1


def test_ranks_that_would_not_switch_together_are_refused(control):
    changes = {"attn_dp_size": 2, "enable_dp_attention": True, "enable_dp_attention_local_control_broadcast": True}
    with pytest.raises(ValueError, match="--enable-dp-attention-local-control-broadcast"):
        control(**changes).post({"policy": "xshare", "add": 1})
    alone = control(enable_dp_attention_local_control_broadcast=True)
    assert alone.post({"policy": "xshare", "add": 1})["switches"] == 1, "of no effect without data-parallel attention"


def test_a_server_that_masks_padding_cannot_observe(control):
    asked = control({"mask_padding_experts": True})
    assert asked.get()["policy"] == "vanilla"
    assert asked.post({"policy": "xshare", "add": 1})["add"] == 1
    with pytest.raises(ValueError, match="--mask-padding-experts with observe"):
        asked.post({"policy": "observe"})


def test_what_a_loaded_layers_runner_cannot_follow_is_refused(asked):
    """Known of the layer alone where --moe-runner-backend is auto."""
    asked.stage.layers[1].takes_kmax = False
    with refused("kmax = 6"):
        asked.post({"policy": "oea", "kmax": 6})
    assert asked.stage.last_switch.number == 0
    assert asked.post({"policy": "oea", "kmax": TOP_K})["switches"] == 1


def test_plans_of_dense_layers_are_not_checked(asked, monkeypatch):
    """As at a start: no layer gets the plan with `kmax`, because the layers after the MoE layers are dense."""
    monkeypatch.setattr("sglang_xshare.live.control.read_model", lambda loaded, path: replace(MODEL, num_layers=5))
    for layer in asked.stage.layers:
        layer.takes_kmax = False
    xshare = {"policy": "xshare", "k0": 1, "add": 2}
    assert asked.post({"policy": "oea", "k0": 2, "kmax": 6, "layers": {"0-2": xshare}})["switches"] == 1


def test_a_rule_of_exact_requests_is_not_lost_without_a_word(control):
    asked = control(enable_priority_scheduling=True)
    assert asked.post({"policy": "xshare", "add": 2, "exact": {"default": True}})["warnings"] == []
    assert asked.post({"policy": "vanilla"})["warnings"] == []
    (warning,) = asked.post({"policy": "xshare", "add": 2})["warnings"]
    assert warning.startswith('exact: this policy does not have {"default": true} of the previous policy: ')
    assert asked.post({"policy": "xshare", "add": 3, "exact": {"priority": 0}})["warnings"] == []
    (warning,) = asked.post({"policy": "xshare", "add": 3})["warnings"]
    assert '{"priority": 0}' in warning


def test_a_restore_to_a_start_without_a_policy_names_none_again(control, monkeypatch):
    asked = control({"mask_padding_experts": True})
    before = asked.stage.in_force
    assert before.shown is None
    fail_once(monkeypatch, asked, is_late=True)
    with pytest.raises(Refusal, match="no memory; 1 of 1 restored the previous policy"):
        asked.post({"policy": "xshare", "k0": 1, "add": 3})
    after = asked.stage.in_force
    assert (after.shown, after.schedule, after.rule) == (None, before.schedule, before.rule)


def test_what_graphs_cannot_follow_is_refused_where_no_capture_is_allowed(asked):
    asked.stage.graphs.captured[StepKey("decode", 2)] = {asked.stage.layers[0]: Assignment()}
    line = r"^CUDA graphs would have to be captured again \(graphs of 2 rows: captured .*\): \"recapture\" is false$"
    with pytest.raises(ValueError, match=line):
        asked.post({"policy": "xshare", "add": 1, "recapture": False})


def test_no_graphs_are_captured_while_memory_is_released(asked):
    asked.stage.graphs.captured[StepKey("decode", 2)] = {asked.stage.layers[0]: Assignment()}
    reporter = make_reporter(current_scheduler_metrics_enabled=False)
    reporter.scheduler.weight_updater.offload_tags.add("kv_cache")
    reason = r"memory must be resumed first \(POST /resume_memory_occupation\)"
    with pytest.raises(ValueError, match=f"^CUDA graphs would have to be captured again: {reason}$"):
        asked.post({"policy": "xshare", "add": 1}, reporter)  # the check refuses, so nothing is restored
    assert asked.stage.last_switch.number == 0
    asked.stage.graphs.captured.clear()
    assert asked.post({"policy": "xshare", "add": 1}, reporter)["switches"] == 1, "nothing has to be captured"


def test_a_restore_does_not_try_a_capture_that_has_failed_twice(asked):
    """The restore undoes a refused switch; graphs come back with the next POST that may capture."""
    captures = list[bool]()
    asked.stage.graphs.captured[StepKey("decode", 2)] = {asked.stage.layers[0]: Assignment()}
    asked.stage.recapture = lambda *args: captures.append(False) or 1 / 0
    end = "without CUDA graphs: division by zero; 1 of 1 restored the previous policy"
    with pytest.raises(Refusal, match=f"{end}$"):
        asked.post({"policy": "xshare", "add": 1})
    assert captures == [False] * 2
    asked.stage.recapture = lambda *args: captures.append(True)
    for policy, recapture in (("vanilla", True), ("oea", False), ("oea", True)):
        told = asked.post({"policy": policy, "recapture": recapture})
        assert told["recaptured"] == (policy == "oea" and recapture)
    assert captures == [False, False, True]
    assert asked.post({"policy": "xshare", "add": 1})["recaptured"] is False


RULE = {"default": True}
KEEPING: list[dict[str, Any]] = [
    {"policy": "xshare", "add": 2, "trial": True},
    {"policy": "xshare", "add": 2, "exact": {"default": False}, "trial": True},
    {"policy": "observe", "trial": True},
    {"policy": "observe"},
    {"policy": "observe", "plans": ["xshare:add=3"]},
    {"policy": "vanilla"},
]


@pytest.mark.parametrize("body", [*KEEPING, {"policy": "xshare", "add": 2}], ids=str)
def test_trials_and_observe_keep_the_rule_for_exact_requests(body, asked):
    """A search's trials are no choice of which requests are exact: those that arrive meanwhile are as before."""
    asked.post({"policy": "xshare", "add": 1, "exact": RULE})
    asked.post(body)
    assert asked.stage.in_force.rule == (Rule(**RULE) if body in KEEPING else Rule())
    assert asked.get()["exact_rule"] == (RULE if body in KEEPING else {})


def test_the_rule_outlives_a_search_on_a_server_that_observes(asked):
    """The search puts back `observe`, which brings no rule of its own."""
    asked.post({"policy": "xshare", "add": 1, "exact": RULE})
    before = asked.post({"policy": "observe"})
    asked.post({"policy": "oea", "k0": 1, "trial": True})
    assert asked.post(before)["trial"] is False
    assert asked.stage.in_force.rule == Rule(**RULE)


@pytest.mark.parametrize("failing", ["check", "commit"])
def test_ranks_compare_after_the_same_forwards_if_one_alone_fails_to_switch(failing, control, monkeypatch):
    """Otherwise ranks would wait for each other forever. The second rank stays vanilla, so it selects nothing."""
    monkeypatch.setattr("sglang_xshare.stage.switch.is_first_rank", lambda: False)
    compared, due = list[int](), list[list[int]]()
    for rank in range(2):
        asked = control(tp_size=2)
        stage = asked.stage
        asked.post({"policy": "vanilla"})
        stage.agreement.forwards = 600
        checksums = iter([torch.tensor([1, 0])])
        stage.agreement._gather = lambda *own, found=checksums: compared.append(1) or next(found, torch.zeros(2))
        for kind, body in (("check", {"check": OEA, "epoch": "1"}), ("commit", {"commit": "1", "number": 2})):
            with monkeypatch.context() as patch:
                if rank and kind == failing:
                    name = "make_next" if kind == "check" else "refresh"
                    patch.setattr(f"sglang_xshare.live.control.{name}", Mock(side_effect=ValueError("no memory")))
                Schedulers(asked.control).hand(body)
        assert stage.in_force.given["policy"] == ("vanilla" if rank else "oea")
        due.append([])
        for _ in range(9):
            compared.clear()
            asked.decode()
            due[rank].append(len(compared))
        assert stage.in_force.given == {"policy": "vanilla"}
    assert due[0] == due[1] == [1, 1, 0, 1, 0, 0, 0, 1, 0]


@pytest.fixture
def ask(monkeypatch):
    """Call it with a control and the body of a message for what a scheduler answers."""

    def handle(control, body: dict[str, Any], method: str = METHOD) -> Any:
        monkeypatch.setattr(hooks, "_control", control)
        return hooks.handle(SimpleNamespace(metrics_reporter=REPORTER), SimpleNamespace(method=method, body=body))

    return handle


def test_a_server_without_a_policy_says_which_flag_has_one_and_other_messages_are_upstreams(ask):
    assert ask(None, {}, "configure") is None
    for body in ({}, {"check": {"policy": "xshare"}, "epoch": "1"}):
        answer = ask(None, body)
        assert (answer.success, answer.response, answer.error) == (False, [], NO_STAGE)


def test_exceeded_page_slots_end_the_scheduler_in_a_switch_too(asked, ask, monkeypatch):
    assert ask(asked.control, {"check": {"policy": "vanilla"}, "epoch": "1"}).success

    def publish(reports: Any, always: bool = False) -> None:
        raise SlotsExceeded("more than 6 experts were active in MoE layers [0]")

    monkeypatch.setattr("sglang_xshare.stage.reports.Reports.publish", publish)
    with pytest.raises(SlotsExceeded):
        ask(asked.control, {"commit": "1", "number": 1})


def test_a_scheduler_never_ends_by_what_is_posted(asked, ask, monkeypatch):
    for body, line in BAD:
        answer = ask(asked.control, {"check": body, "epoch": "1"})
        assert not answer.success
        assert answer.error
        assert "\n" not in answer.error, line
    monkeypatch.setattr("sglang_xshare.live.control.check_graphs", lambda *args: 1 / 0)
    answer = ask(asked.control, {"check": {"policy": "vanilla"}, "epoch": "1"})
    assert (answer.success, answer.error) == (False, "ZeroDivisionError: division by zero")
    assert asked.stage.last_switch.number == 0


@pytest.mark.parametrize(
    "body", [{"check": [], "epoch": "1"}, {"commit": {}, "number": 1}, {"restore": "1", "number": "2"}], ids=str
)
def test_a_message_of_another_form_is_refused(body, asked, ask, caplog):
    """SGLang's route /dumper/expert_policy passes on any body. A commit that is not made has no success."""
    told = ask(asked.control, body)
    said = f"a message must be a check, a commit or a restore (got {json.dumps(body)})"
    assert (told.success, told.error, asked.stage.last_switch.number) == (False, said, 0)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("get", {}), ("check", {"check": {"policy": "vanilla"}, "epoch": "1"})),
        *(("commit", {"commit": "1", "number": 1}), ("restore", {"restore": "1", "number": 2})),
    ],
)
def test_what_fails_is_logged_by_the_method_that_was_asked(name, body, asked, ask, monkeypatch, caplog):
    monkeypatch.setattr(asked.control, name, lambda *_: 1 / 0)
    assert not ask(asked.control, body).success
    assert [record.getMessage() for record in caplog.records] == [f"{'POST' if body else 'GET'} /expert_policy"]
