"""The stage around a model: which forwards select, and what is checked."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang_xshare import Router, build_plan, hooks, select
from sglang_xshare.compatibility.arguments import Arguments
from sglang_xshare.stage.frame import PolicyBypassed
from sglang_xshare.stage.record.counters import AFTER, STEPS
from sglang_xshare.start import start
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, TOP_K, XSHARE, Config, Model, bind, flags, forward_batch, outcomes, run, runner


def count_experts(model: Model) -> list[int | None]:
    """Different ids handed to each layer's runner, None for vanilla."""
    return [routed and len(routed[1].unique()) for routed in model.routed]


@pytest.mark.usefixtures("attach")
def test_batches_are_those_that_sglang_decides_on_after_loading(monkeypatch):
    """Without --max-running-requests it decides how many requests run at once by the memory that is left."""
    own = runner(model := Model(1), **dict.fromkeys(("max_running_requests", "speculative_num_draft_tokens")))
    own.server_args.device, own.server_args.speculative_adaptive = "cpu", False
    monkeypatch.setattr("sglang_xshare.upstream.graphs.list_sizes", None)  # SGLang has no request pool yet
    stage = start(own, Arguments(schedule=None), bind(model)).stage
    assert stage.in_force.batches == Batches()
    own.max_running_requests = 50
    monkeypatch.setattr("sglang_xshare.upstream.graphs.list_sizes", lambda *args: [48, 50])
    stage.update_batches()
    assert stage.in_force.batches == Batches((48, 50), most=50)


@pytest.mark.parametrize("off", [{}, {"expert_policy": "vanilla"}])
def test_off_touches_nothing(off, attach):
    model = Model()
    forward = model.forward
    assert attach(model, **off) is None
    assert model.forward == forward
    assert hooks.route(model.configs[0], None) is model.configs[0]
    assert hooks.report(None) == ""
    assert hooks.capture_sizes(SimpleNamespace(**off), [1, 2, 4]) == [1, 2, 4]
    assert hooks.capture_limit(SimpleNamespace(), 4, 8, 64, 32) == 4
    assert (hooks.allows_graph(None), hooks.fits_slots(None)) == (True, False)
    assert hooks.prepare(model.configs[0], "format", "logits") == ("format", "logits")
    assert hooks.finish(model.configs[0], "ids", "weights") == "ids"
    assert hooks.align(lambda *given: given, "ids", 16, 8) == ("ids", 16, 8)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"expert_policy": "xshare"}, "85 % up to 7 rows, 90 % up to 15, 93 % from 16 on"),
        ({"expert_policy": "xshare:fast,k0=2"}, "80 % up to 7 rows, 85 % up to 15, 90 % from 16 on"),
        ({"expert_policy": "xshare:max_add=9"}, None),
        ({"expert_policy": "xshare:mass=0.995"}, "99.5 %"),
        (XSHARE, None),
        (flags("xshare", by_rows={"16": {"add": 2}}), None),
        ({"expert_policy": "xshare", "expert_policy_config": '{"layers": {"0": {"add": 2}}}'}, None),
    ],
    ids=["default", "preset", "capped", "mass", "add", "by rows", "layers"],
)
def test_the_log_says_what_a_step_keeps(policy, kept, build, caplog):
    with caplog.at_level("INFO"):
        build(**policy)
    assert "Expert policy xshare on 3 MoE layers: {" in caplog.text
    assert ("a step keeps at least" in caplog.text) == (kept is not None)
    assert kept is None or f"a step keeps at least this share of its batch's utility: {kept}\n" in caplog.text


def test_decode_selects_in_every_layer(build):
    model, installed = build(**XSHARE)
    run(model, "decode", 16)
    assert all(count <= 16 + 2 for count in count_experts(model))
    assert outcomes(installed) == {"policy": 1}
    assert installed.agreement is None, "one rank has no other to compare with"
    assert installed.acting.counters.totals[:, STEPS].tolist() == [1, 1, 1]
    # Counted by the stage, and by what the runner receives.
    assert installed.acting.counters.totals[:, AFTER].tolist() == count_experts(model)


def test_prefill_and_single_rows_stay_vanilla(build):
    model, installed = build(**XSHARE)
    for mode, rows in (("prefill", 40), ("idle", 0), ("decode", 1), ("decode", 4)):
        run(model, mode, rows)
        assert [routed is None for routed in model.routed] == [rows != 4] * 3
    assert outcomes(installed) == {"prefill": 2, "min_rows": 1, "policy": 1}


def test_a_plan_that_cannot_change_anything_is_not_run(build):
    """Four rows of a top-4 model want 12 experts beyond their first."""
    layers, by_rows = {"1": {"add": 11}}, {"3": {"policy": "vanilla"}}
    model, installed = build(2, **flags("xshare", k0=1, add=12, layers=layers, by_rows=by_rows))
    run(model, "decode", 4)
    assert [count is None for count in count_experts(model)] == [True, False]
    for rows in (2, 3):
        run(model, "decode", rows)
        assert count_experts(model) == [None, None]
    assert outcomes(installed) == {"policy": 1, "unchanged": 1, "override": 1}


def test_a_plan_that_cannot_change_anything_still_masks_padding(build):
    model, installed = build(1, Batches(captured=(1, 2, 4)), **flags("xshare", k0=1, add=24))
    run(model, "decode", 2)
    assert count_experts(model) == [None]
    installed.reads_padding = True
    run(model, "decode", 4, padding=1)
    weights, _ = model.routed[0]
    assert weights[3].eq(0).all()
    assert outcomes(installed) == {"unchanged": 1, "policy": 1}


def test_verify_groups_by_request(build):
    one, four = (flags("xshare", k0=0, add=0, add_per_request=most) for most in (1, TOP_K))
    model, _ = build(1, **one, speculative_algorithm="EAGLE3")
    run(model, "verify", 12, batch_size=3)
    best = build_plan("xshare", k0=0, add=1)
    alone = [select(request, best, Router(TOP_K)).selected for request in model.logits.split(4)]
    assert count_experts(model) == [torch.stack(alone).any(0).sum()], "the best expert of every request"
    run(model, "verify", 12, batch_size=1)
    assert count_experts(model) == [1]
    model, _ = build(1, **four, speculative_algorithm="EAGLE3")
    run(model, "verify", 12, batch_size=3)
    assert count_experts(model) != [None], "the four rows of a request want more than one row does"


def test_layers_and_batch_sizes_get_their_own_plans(build):
    layers = {"1": {"policy": "vanilla"}, "2": {"policy": "pruned", "k0": 3}}
    model, _ = build(**flags("xshare", k0=1, add=0, layers=layers, by_rows={"8": {"k0": 2}}))
    run(model, "decode", 4)
    own_first = len(model.logits.argmax(-1).unique())
    assert count_experts(model) == [own_first, None, len(model.logits.topk(3).indices.unique())]
    run(model, "decode", 8)
    two, three = (len(model.logits.topk(k).indices.unique()) for k in (2, 3))
    assert count_experts(model) == [two, None, three]


@pytest.mark.parametrize("layer", ["0", "1"])
def test_a_step_without_any_plan_counts_as_its_first_reason(build, layer):
    """One layer is overridden, the others' plans cannot change anything, whichever comes first."""
    model, installed = build(2, **flags("xshare", k0=1, add=12, layers={layer: {"policy": "vanilla"}}))
    run(model, "decode", 4)
    assert count_experts(model) == [None, None]
    assert outcomes(installed) == {"unchanged": 1}


def test_a_layer_that_does_not_select_stops_the_step(build):
    """A selection of an earlier step does not count."""
    model, _ = build(**XSHARE)
    run(model, "decode", 4)
    model.skipped, line = {1, 2}, r"^MoE layers \[1, 2\] did not route through the expert policy in a decode"
    with pytest.raises(PolicyBypassed, match=line):
        run(model, "decode", 4)
    run(model, "prefill", 4)


@pytest.mark.parametrize("alone", [False, True])
def test_context_ends_with_the_forward_even_when_it_fails(build, alone):
    """The runner runs a step, or a capture or warm-up runs the model alone. SGLang asks before the next forward whether
    its batch may replay a graph, and the answer must not come from the last frame.
    """
    model, installed = build(1, **XSHARE)
    run(model, "prefill", 4)
    assert installed.current_frame.frame is None
    model.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, "decode", 4, alone=alone)
    assert installed.current_frame.frame is None
    assert hooks.route(model.configs[0], None) is model.configs[0]
    assert outcomes(installed) == {"prefill": 1}


def test_warm_ups_and_captures_count_as_no_forward(build):
    """Compiled prefill graphs and DeepGEMM's dummy runs call the model without its runner before the first request."""
    model, installed = build(**XSHARE)
    for mode in ("prefill", "decode"):
        run(model, mode, 4, alone=True)
    for config in model.configs:
        assert hooks.route(config, None) is config
    assert outcomes(installed) == {}


def test_steps_outside_the_models_forward_are_vanilla_and_counted(build):
    """A prefill is vanilla in any case."""
    model, installed = build(**XSHARE)
    del model.forward  # the wrapped one
    for mode in ("decode", "prefill"):
        run(model, mode, 4)
        assert model.routed == [None] * 3
    assert outcomes(installed) == {"no_context": 1, "prefill": 1}


def test_another_models_config_is_returned_untouched(build):
    """A draft model may be a mixture of experts too, and runs in the same process."""
    (_, installed), draft = build(1, **XSHARE), Model(1)
    shown = {**XSHARE, "expert_policy_config": installed.in_force.shown}  # as 0.5.17's one record has it by then
    forward = draft.forward
    hooks.attach(runner(draft, is_draft_worker=True, **shown))
    assert hooks._stage is installed
    assert draft.forward == forward
    assert hooks.route(draft.configs[0], None) is draft.configs[0]
    assert outcomes(installed) == {}


def test_a_forward_batch_may_be_passed_by_its_name(build):
    """And the wrapped forward keeps its signature, which upstream inspects for pipeline parallelism."""
    model, installed = build(**XSHARE)
    model.logits = torch.randn(4, EXPERTS)
    model.runner.forward(forward_batch=forward_batch("decode", 4))
    assert outcomes(installed) == {"policy": 1}
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)


@pytest.mark.parametrize(("on_output", "own", "shared"), [(True, 2.5, 1.0), (False, 1.0, 0.4)])
def test_a_shared_expert_has_the_weight_that_a_later_scaling_cancels(attach, on_output, own, shared):
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 4, "num_fused_shared_experts": 1}
    scaling = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": on_output}
    model = Model(0)
    model.configs = [Config(TOP_K + 1, **groups, **scaling)]
    attach(model, **XSHARE)
    run(model, "decode", 4)
    weights, ids = model.routed[0]
    assert ids[:, -1].tolist() == [EXPERTS] * 4
    torch.testing.assert_close(weights[:, -1], torch.full((4,), shared))
    torch.testing.assert_close(weights[:, :-1].sum(-1), torch.full((4,), own))


def test_calls_are_kept_for_so_many_batch_sizes(build, monkeypatch):
    """Draft trees and requests come in any number: what is kept for their sizes must not grow for days."""
    monkeypatch.setattr("sglang_xshare.stage.layer.MAX_CALLS", 2)
    model, installed = build(**XSHARE)
    for rows in range(4, 10):
        run(model, "decode", rows)
        assert all(1 <= len(layer._calls) <= 2 for layer in installed.layers)


def test_a_plan_without_a_compiled_call_is_kept_alive(build, monkeypatch):
    """Calls are found by `id()`: a plan made after a switch could have the id of one that is gone, and no call then."""
    monkeypatch.setattr("sglang_xshare.stage.layer.prepare_call", lambda *args: None)
    model, installed = build(1, **XSHARE)
    run(model, "decode", 4)
    ((place, (plan, call)),) = installed.layers[0]._calls.items()
    assert (id(plan), call) == (place[0], None)
