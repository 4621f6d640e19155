"""Answers to a POST or a start whose policy is not the one that was meant, or has no effect."""

import json
from types import SimpleNamespace

import pytest

from refused import refused
from sglang_xshare import hooks
from sglang_xshare.policies.spelling import parse_policy
from stage.fake import EXPERTS, make_reporter


@pytest.mark.parametrize("spelt", ["xshare:careful", "xshare:fast"])
def test_a_preset_is_answered_with_its_keys(spelt, control):
    """A preset is the command line's word; "xshare" alone, which is near, is another mass."""
    asked = control()
    with refused(f"policy = {spelt!r}") as raised:
        asked.post({"policy": spelt})
    said = str(raised.value)
    body = json.loads(said[said.index("{") :])
    assert (body.pop("policy"), body) == parse_policy(spelt)
    assert asked.post({"policy": spelt.partition(":")[0], **body})["switches"] == 1


def limited(requests: int) -> SimpleNamespace:
    """The scheduler of a server that runs so many requests at once, with its reporter."""
    scheduler = SimpleNamespace(forward_ct=0, max_running_requests=requests)
    scheduler.metrics_reporter = make_reporter(current_scheduler_metrics_enabled=False)
    scheduler.metrics_reporter.scheduler = scheduler
    return scheduler


def test_what_no_batch_of_a_running_server_reaches_is_refused(control):
    """SGLang decides how many requests run at once after the checks of a start, by the memory that is left."""
    asked = control(max_running_requests=None)
    scheduler = limited(16)
    for keys in ({"min_rows": 17}, {"min_rows": 18, "max_rows": 40}):
        with pytest.raises(ValueError, match=f"min_rows = {keys['min_rows']}.*no step of this server.*at most 16"):
            asked.post({"policy": "xshare", **keys}, scheduler.metrics_reporter)
    assert asked.post({"policy": "xshare", "min_rows": 16}, scheduler.metrics_reporter)["switches"] == 1


LIMITS = [
    ({"min_rows": 16}, None),
    ({"min_rows": 17}, "min_rows = 17"),
    ({"min_rows": 18, "max_rows": 40}, "min_rows = 18 to max_rows = 40"),
]


@pytest.mark.parametrize(("limits", "warned"), LIMITS)
def test_what_no_batch_reaches_is_warned_of_before_the_first_request(limits, warned, control, monkeypatch, caplog):
    config = {"k0": 1, "add": 2, **limits}
    asked = control({"expert_policy": "xshare", "expert_policy_config": config}, max_running_requests=None)
    monkeypatch.setattr(hooks, "_control", asked.control)
    sampling = SimpleNamespace(custom_params=None)
    for rid in ("first", "second"):
        request = SimpleNamespace(rid=rid, sampling_params=sampling, priority=None, extra_key=None, finished=bool)
        hooks.admit(limited(16), request)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warned is not None)
    line = f"--expert-policy xshare: {warned}: this server's steps have other numbers of rows (at most 16)"
    assert warned is None or warnings[0].startswith(line)


def test_a_kmax_beyond_the_models_experts_is_warned_of(control):
    asked = control()
    assert asked.post({"policy": "oea", "kmax": EXPERTS})["warnings"] == []
    (warning,) = asked.post({"policy": "oea", "kmax": EXPERTS + 1})["warnings"]
    assert warning == f"--expert-policy oea: kmax = {EXPERTS + 1} has no effect beyond the model's {EXPERTS} experts"
