"""Layers of a loaded model that are found or refused, and the plans that its routers rule out."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refused import refused
from sglang_xshare import Router, build_plan, hooks
from sglang_xshare.compatibility import layers as start_layers
from sglang_xshare.compatibility.arguments import read_arguments
from sglang_xshare.compatibility.layers import check_plans, check_router, count_hashed
from sglang_xshare.policies.plan import SelectionPlan
from sglang_xshare.refusal import REFUSED as ENDED
from sglang_xshare.refusal import ExpertPolicyError
from sglang_xshare.stage.layer import FILLED

pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
from sglang.srt import runtime_context
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.topk import TopK, TopKConfig

from compatibility.loaded import FORMATS, USUAL, bare, config, find


@pytest.mark.parametrize("recorded", [False, True])
def test_every_router_is_found_with_its_config(recorded, read):
    configs = [config(), config(top_k=2)]
    layers = read(configs, enable_return_routed_experts=recorded)
    for found, given in zip(layers, configs, strict=True):
        assert dataclasses.asdict(found.plain_config) == dataclasses.asdict(given)
        assert found.plain_config.layer is found.selecting_config.layer is found
    assert [(layer.layer_id, layer.router.top_k) for layer in layers] == [(0, 4), (1, 2)]


@pytest.mark.parametrize(("layer_id", "found"), [(5, 5), (None, 3)])
def test_a_router_that_is_not_told_its_layer_has_it_in_its_name(layer_id, found, monkeypatch):
    """As Mixtral's before 0.5.22: overrides by layer and the trace need the number."""
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"3": torch.nn.Module()})
    model.layers["3"].topk = bare(TopK, layer_id=layer_id, topk_config=config())
    overrides = {"k0": 1, "layers": {str(found): {"add": 2}}}
    server_args = SimpleNamespace(expert_policy="xshare", expert_policy_config=overrides, **USUAL)
    arguments = read_arguments(server_args)
    runner = SimpleNamespace(model=model, server_args=server_args, device="cpu")
    (layer,) = start_layers.read_layers(runner, arguments)
    assert layer.layer_id == found
    assert model.layers["3"].topk.topk_config is layer.plain_config
    assert arguments.schedule.plan(layer.layer_id, 16).add == 2


def test_more_routers_than_runners_are_served(read):
    """DeepSeek's first model runs its experts without a FusedMoE."""
    assert len(read([config(), config()], runners=0)) == 2


RANKING, BYPASSED = [config(FORMATS.TRITON_KERNEL)], [config(FORMATS.BYPASSED)]
OWN_SHARE = {"expert_policy": "oea", "expert_policy_config": {"own_share": 0.75}}
RECORDED = {"method": "triton_kernel", "enable_return_routed_experts": True}
BUDGET = {"budget": 8, "coverage": "truncate", "phases": ["decode"]}
TRUNCATE = {"method": "triton_kernel", "expert_policy": "moe-spec", "expert_policy_config": BUDGET}
ELSEWHERE = {"k0": 1, "add": 4, "layers": {"7": {"k0": 2}, "0-1": {"policy": "vanilla"}}}
REFUSED: dict[str, tuple[list[TopKConfig], dict[str, Any]]] = {
    "a layer without TopK": ([config()], {"runners": 2}),
    "a router without FusedMoE": ([config(), config()], {"runners": 1}),
    "no layer": ([], {}),
    "an unknown router": ([config(), config(scoring_func="tanh")], {}),
    "routing in the kernel": (BYPASSED, {}),
    "logits for a dispatcher": (BYPASSED, {"moe_a2a_backend": "deepep"}),
    "a share of what does not renormalize": ([config(), config(renormalize=False)], OWN_SHARE),
    "routed experts of a runner that ranks logits": (RANKING, RECORDED),
    "truncation by a runner that ranks logits": (RANKING, TRUNCATE),
    "keys of a layer that the model lacks": ([config(), config()], {"expert_policy_config": ELSEWHERE}),
    "paged experts of a layer that routes by a hash": ([config()], {"runners": 2}),
}


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)
    if case.startswith("paged"):
        monkeypatch.setattr(start_layers, "find_paging", lambda experts: experts)
        monkeypatch.setattr(start_layers, "count_hashed", lambda modules: 1)
    configs, flags = REFUSED[case]
    find(configs, **flags)


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_a_loaded_model_shows_ends_the_process_with_one_line(case, read, capsys, monkeypatch):
    configs, flags = REFUSED[case]
    with pytest.raises(ExpertPolicyError) as error:
        refuse(case, monkeypatch)
    for rank, size, named in ((0, 1, ""), (0, 2, "rank 0: "), (1, 2, "rank 1: ")):
        set_rank(monkeypatch, rank, size)
        with pytest.raises(SystemExit) as ended:
            read(configs, function=lambda runner, _: start_layers.find_layers(runner), **flags)
        assert not isinstance(ended.value, Exception), "upstream logs a traceback of every Exception"
        assert ended.value.code == ENDED
        assert capsys.readouterr().err == f"{named}{error.value}\n", "it may be the only rank that refuses"


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    parallel = SimpleNamespace(tp_rank=rank, tp_size=size, attn_tp_size=size)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)


def test_a_trace_that_is_gone_when_weights_are_loaded_ends_the_process_with_one_line(capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone" / "trace.jsonl"
    server_args = SimpleNamespace(expert_policy="xshare", expert_policy_trace=str(gone), **USUAL)
    set_rank(monkeypatch, 0, 1)
    with pytest.raises(SystemExit) as ended:
        hooks.attach(SimpleNamespace(is_draft_worker=False, server_args=server_args))
    assert ended.value.code == ENDED
    line = f"--expert-policy-trace {gone}: must be a file that can be written (No such file or directory)"
    assert (said := capsys.readouterr().err).startswith(line)
    assert said.count("\n") == 1


def test_a_replica_that_refuses_its_model_is_killed_by_upstream(read):
    """SGLang's controller would wait forever for a replica that just ended; for one that raises, it ends the server."""
    with refused("--model-path model"):
        read([], function=lambda runner, _: start_layers.find_layers(runner), dp_size=2)


WIDER = build_plan("oea", k0=2, kmax=6)


def check(
    router: Router, num_shared: int = 0, dispatch: str | None = None, gate: Any = None, plan: SelectionPlan = WIDER
) -> None:
    """Check a layer's router under a plan, by default one of six columns."""
    modules = {"model.layers.3.mlp.gate": gate} if gate is not None else {}
    config = SimpleNamespace(ep_dispatch_algorithm=dispatch)
    layer: Any = SimpleNamespace(router=router, num_shared=num_shared, convention=FILLED, takes_kmax=True)
    check_router("model.layers.3.mlp.topk", modules)
    check_plans(layer, [plan], config)


def test_more_columns_fit_a_plain_router_and_a_shared_expert_that_stays_in_its_place():
    check(Router(4))
    check(Router(4), dispatch="static")
    check(Router(4), num_shared=1, gate=SimpleNamespace(e_score_correction_bias_vl=None))
    check(Router(4), num_shared=1, dispatch="static", plan=build_plan("oea", k0=2))


def test_what_does_not_fit_is_refused():
    for arguments, named in (
        ({"num_shared": 1, "dispatch": "static"}, "^kmax = 6: .*--disable-shared-experts-fusion$"),
        ({"router": Router(4, quota_groups=2)}, "^kmax = 6: .* 2 experts of each group"),
        ({"gate": SimpleNamespace(e_score_correction_bias_vl=torch.zeros(4))}, "^DeepSeek-V4.1 "),
    ):
        with pytest.raises(ValueError, match=named):
            check(**{"router": Router(4), **arguments})


def test_on_amd_a_wider_row_would_lose_its_shared_expert(monkeypatch):
    """aiter's column is added to rows that are narrower than with it."""
    monkeypatch.setattr("sglang_xshare.compatibility.layers.routes_on", lambda flag: flag == "_use_aiter")
    check(Router(4))
    with refused("kmax = 6"):
        check(Router(4), num_shared=1)


def test_layers_that_route_by_a_hash_are_counted():
    hashed = object.__new__(HashTopK)
    assert count_hashed({"model.layers.0.mlp.topk": hashed, "model.layers.3.mlp.topk": object()}) == 1


def test_a_layer_that_routes_by_a_hash_needs_no_router(read, monkeypatch):
    monkeypatch.setattr(start_layers, "count_hashed", lambda modules: 1)
    assert [layer.layer_id for layer in read([config()], runners=2)] == [0]
