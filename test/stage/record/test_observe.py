"""`observe` in the stage: the model routes as ever, and every plan's counts are what `select()` says of the logits."""

import json
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from selection.launched import forgets
from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.stage.frame import PolicyBypassed
from sglang_xshare.stage.lane import count_vanilla
from sglang_xshare.stage.layer import DROPPED, MASKED
from sglang_xshare.stage.record.counters import AFTER, BEFORE, KEPT, ROWS
from stage.fake import EXPERTS, TOP_K, Formats, RefuseHostData, flags, forward_batch, read_figure, run
from stage.switching import decode

__all__ = ["forgets"]
PLANS = {"xshare:k0=1,add=2": build_plan("xshare", k0=1, add=2), "oea:k0=1": build_plan("oea", k0=1)}
OBSERVE = flags("observe", plans=list(PLANS))


def expect(logits: torch.Tensor, plan: Any, valid: torch.Tensor | None = None) -> list[float]:
    """[experts before, after, kept mass] of one layer and step."""
    chosen = select(logits, plan, Router(TOP_K), Batch(valid), backend="reference")
    return [int(chosen.vanilla_active.sum()), int(chosen.active.sum()), float(chosen.kept_mass.sum())]


def list_counters(installed: Any) -> list[Any]:
    """Return the counters of each plan of `observe`."""
    return [lane.counters for lane in installed.in_force.lanes]


def test_the_model_routes_as_ever_and_every_plan_is_counted(build):
    model, installed = build(2, **OBSERVE)
    run(model, "decode", 16)
    assert model.routed == [None, None], "every layer got its own config back"
    for plan, counters in zip(PLANS.values(), list_counters(installed), strict=True):
        before, after, kept = expect(model.logits, plan)
        assert after < before
        assert counters.totals.tolist() == [pytest.approx([1, before, after, kept, 16, *[0] * 5])] * 2
    before = expect(model.logits, VANILLA)[0]
    assert installed.acting.counters.totals.tolist() == [[1, before, before, 16, 16, *[0] * 5]] * 2


def test_a_plans_counts_tell_those_of_vanilla():
    """And stay as they are: the trace has both."""
    counts = torch.arange(10.0)[None]
    assert count_vanilla(counts).tolist() == [[0, 1, 1, 4, 4, 0, 6, 7, 7, 9]]
    assert counts.tolist() == [[*range(10)]]


def test_padding_is_not_observed(build):
    model, installed = build(1, **OBSERVE)
    installed.reads_padding = True
    run(model, "decode", 8, padding=3)
    valid = torch.arange(8) < 5
    for plan, counters in zip(PLANS.values(), list_counters(installed), strict=True):
        counts = counters.totals[0, [BEFORE, AFTER, KEPT, ROWS]].tolist()
        assert counts == pytest.approx([*expect(model.logits, plan, valid), 5])
    totals = [counters.totals.clone() for counters in list_counters(installed)]
    run(model, "decode", 4, padding=4)
    for counters, before in zip(list_counters(installed), totals, strict=True):
        assert counters.totals.equal(before), "a graph that is being captured has no live row"


def test_single_rows_are_vanilla_under_every_plan_and_prefill_is_not_observed(build):
    model, installed = build(1, **OBSERVE)
    run(model, "decode", 1)
    run(model, "prefill", 40)
    for counters in list_counters(installed):
        assert counters.totals.tolist() == [[1, TOP_K, TOP_K, 1, 1, *[0] * 5]]
    logged, exported = installed.acting.logged.read(), installed.acting.exported.read()
    assert logged.outcomes | {"observed": 1, "prefill": 1} == exported.outcomes


def test_a_layer_that_is_not_observed_stops_the_server(build):
    model, _ = build(**OBSERVE)
    model.skipped = {1}
    with pytest.raises(PolicyBypassed, match=r"\[1\]"):
        run(model, "decode", 4)


@pytest.mark.parametrize("convention", [MASKED, DROPPED])
def test_a_runner_that_ranks_logits_gets_the_models_own(build, convention):
    model, installed = build(1, **OBSERVE)
    installed.layers[0].convention, installed.layers[0].runner_ranks_logits = convention, True
    logits, output_format = torch.randn(4, EXPERTS), Formats.BYPASSED

    def forward() -> str:
        assert hooks.prepare(model.configs[0], output_format, logits) == (output_format, logits)
        return "output"

    installed.run(forward_batch("decode", 4), forward)
    assert [int(counters.totals[0, 0]) for counters in list_counters(installed)] == [1, 1]


def test_the_step_never_waits_for_the_device(build, tmp_path, forgets):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, installed = build(2, **OBSERVE, expert_policy_trace=str(tmp_path / "trace"))
        installed.reads_padding = True
        model.logits = torch.randn(12, EXPERTS)
        with RefuseHostData():
            model.forward(None, None, forward_batch("decode", 12, padding=4))


def test_log_metrics_and_trace(build, tmp_path, reporter):
    model, installed = build(1, **OBSERVE, expert_policy_trace=str(tmp_path / "trace.jsonl"))
    decode(model, reporter, 16)
    before, after, kept = expect(model.logits, PLANS["oea:k0=1"])
    assert f", oea:k0=1 would keep {after:.1f} (kept mass {kept / 16:.4f})" in hooks.report(reporter)
    assert read_figure("observed_experts_total", plan="oea:k0=1") == after
    assert "would keep" not in hooks.report(reporter), "told before"

    installed.trace.write()
    line = json.loads((tmp_path / "trace.jsonl").read_text())
    names = ("batch_size", "experts_before", "experts_after", "kept_mass")
    assert [line[name] for name in names] == [16, before, before, 1.0]
    assert list(line["plans"]) == list(PLANS)
    assert line["plans"]["oea:k0=1"] == {"experts_after": after, "kept_mass": pytest.approx(kept / 16)}
