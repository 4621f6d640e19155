"""Answers to a POST or a start whose policy is not the one that was meant, or has no effect."""

import json
from types import SimpleNamespace

import pytest

from refused import refused
from sglang_xshare import hooks
from sglang_xshare.policies.spelling import parse_policy
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, make_reporter

BEYOND = [({"min_rows": 17}, "min_rows = 17"), ({"min_rows": 18, "max_rows": 40}, "min_rows = 18 to max_rows = 40")]


@pytest.mark.parametrize("spelt", ["xshare:careful", "xshare:fast"])
def test_a_preset_is_answered_with_its_keys(spelt, asked):
    """A preset is the command line's word; "xshare" alone, which is near, is another mass."""
    with refused(f"policy = {spelt!r}") as raised:
        asked.post({"policy": spelt})
    said = str(raised.value)
    body = json.loads(said[said.index("{") :])
    assert (body.pop("policy"), body) == parse_policy(spelt)
    assert asked.post({"policy": spelt.partition(":")[0], **body})["switches"] == 1


def test_what_no_batch_of_a_running_server_reaches_is_refused(control):
    """SGLang decides how many requests run at once after the checks of a start, by the memory that is left."""
    asked = control(max_running_requests=None)
    asked.stage.find_batches = lambda rows: Batches((8, 16), most=14)
    for keys, limits in (*BEYOND, ({"min_rows": 9, "max_rows": 13}, "min_rows = 9 to max_rows = 13")):
        with refused(f"--expert-policy xshare with {limits}") as raised:
            asked.post({"policy": "xshare", **keys})
        assert str(raised.value).endswith("must include one of its batch sizes (captured: 8, 16; at most 14)")
    assert asked.post({"policy": "xshare", "min_rows": 16})["switches"] == 1


def test_with_paged_experts_a_batch_between_captured_sizes_has_its_own_rows(control):
    """A graph whose experts may not fit the page slots is not captured, and then SGLang does not pad the batch."""
    between, beyond = ({"policy": "xshare", "min_rows": 9, "max_rows": 13}, {"policy": "xshare", "min_rows": 17})
    for slots, keys, limits in ((EXPERTS, between, "9 to max_rows = 13"), (16, beyond, "17")):
        asked = control(enable_paged_experts=True, paged_experts_num_resident=slots)
        asked.stage.find_batches = lambda rows: Batches((8, 16), most=16)
        with refused(f"--expert-policy xshare with min_rows = {limits}"):
            asked.post(keys)
    assert asked.post(between)["switches"] == 1


@pytest.mark.parametrize(("limits", "warned"), [({"min_rows": 16}, None), *BEYOND])
def test_what_no_batch_reaches_is_warned_of_before_the_first_request(limits, warned, control, monkeypatch, caplog):
    config = {"k0": 1, "add": 2, **limits}
    asked = control({"expert_policy": "xshare", "expert_policy_config": config}, max_running_requests=None)
    asked.stage.find_batches = lambda rows: Batches(most=16)
    monkeypatch.setattr(hooks, "_control", asked.control)
    sampling = SimpleNamespace(custom_params=None)
    for rid in ("first", "second"):
        request = SimpleNamespace(rid=rid, sampling_params=sampling, priority=None, extra_key=None, finished=bool)
        hooks.admit(SimpleNamespace(metrics_reporter=make_reporter()), request)
    assert (asked.get()["limits"]["batches"], asked.get()["limits"]["most_rows"]) == ("at most 16", 16)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warned is not None)
    line = f"--expert-policy xshare: {warned}: this server's steps have other numbers of rows (at most 16)"
    assert warned is None or warnings[0].startswith(line)


def test_a_kmax_beyond_the_models_experts_is_warned_of(asked):
    assert asked.post({"policy": "oea", "kmax": EXPERTS})["warnings"] == []
    (warning,) = asked.post({"policy": "oea", "kmax": EXPERTS + 1})["warnings"]
    assert warning == f"--expert-policy oea: kmax = {EXPERTS + 1} has no effect beyond the model's {EXPERTS} experts"
