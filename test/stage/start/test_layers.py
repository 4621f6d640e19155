"""How a loaded model's layers are found or refused."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare.stage.start import layers as start_layers
from sglang_xshare.stage.start import runners
from sglang_xshare.stage.start.arguments import read_arguments
from sglang_xshare.stage.start.refusal import REFUSED, ExpertPolicyError
from sglang_xshare.stage.start.runners import TABLE, list_runners
from sglang_xshare.stage.upstream import find_runner

pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
import sglang
from sglang.srt import runtime_context
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import SharedExpertsConfig, TopK, TopKConfig, TopKOutputFormat
from sglang.srt.layers.moe.utils import MoeRunnerBackend

FORMATS = TopKOutputFormat
NO_POLICY = "cannot be served with an expert policy"


def config(output_format: TopKOutputFormat | None = FORMATS.STANDARD, **changes: Any) -> TopKConfig:
    return TopKConfig(**{"top_k": 4, "renormalize": True, "output_format": output_format, **changes})


def bare(kind: type[torch.nn.Module], **attributes: Any) -> torch.nn.Module:
    """A module of upstream's class, without what its constructor needs of a running server."""
    module = object.__new__(kind)
    torch.nn.Module.__init__(module)
    vars(module).update(attributes)
    return module


class Method:
    """A quantization method as 0.5.23 has it: it names what it runs."""

    def __init__(self, backend: str | None, **marks: Any) -> None:
        self.backend = backend
        vars(self).update(marks)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> MoeRunnerBackend | None:
        return self.backend and MoeRunnerBackend(self.backend)


class Loaded(torch.nn.Module):
    """A loaded model: MoE layers, each router with its config, and runners of a backend."""

    def __init__(self, configs: list[TopKConfig], runners: int, method: Method, **attributes: Any) -> None:
        super().__init__()
        usual = {"num_fused_shared_experts": 0, "supports_deferred_finalize": False}
        for layer_id, topk_config in enumerate(configs):
            self.add_module(f"topk-{layer_id}", bare(TopK, layer_id=layer_id, topk_config=topk_config))
        for layer_id in range(runners):
            experts = bare(FusedMoE, quant_method=method, layer_id=layer_id, **{**usual, **attributes})
            self.add_module(f"experts-{layer_id}", experts)


USUAL = {
    **{"model_path": "model", "speculative_algorithm": None, "pp_size": 1, "dp_size": 1, "ep_size": 1},
    "ep_dispatch_algorithm": None,
}


@pytest.fixture
def read(monkeypatch) -> Callable[..., Any]:
    """Call it with a model's routers and flags for the layers the stage finds."""
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)

    def find(
        configs: list[TopKConfig],
        runners: int,
        function=start_layers.read_layers,
        method: Method | str | None = "triton",
        attributes: dict[str, Any] | None = None,
        **flags: Any,
    ) -> Any:
        server_args = SimpleNamespace(**{"expert_policy": "xshare", **USUAL, **flags})
        method = method if isinstance(method, Method) else Method(method)
        model = Loaded(configs, runners, method, **attributes or {})
        runner = SimpleNamespace(model=model, server_args=server_args, device="cuda")
        return function(runner, read_arguments(server_args))

    return find


def test_every_router_is_found_with_its_config(read):
    configs = [config(), config(top_k=2)]
    layers = read(configs, runners=2)
    assert [found is given for (found, _), given in zip(layers, configs, strict=True)] == [True, True]
    assert [(layer.layer_id, layer.router.top_k) for _, layer in layers] == [(0, 4), (1, 2)]


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
    ((_, layer),) = start_layers.read_layers(runner, arguments)
    assert layer.layer_id == found
    assert arguments.schedule.plan(layer.layer_id, 16).add == 2


def test_more_routers_than_runners_are_served(read):
    """DeepSeek's first model runs its experts without a FusedMoE."""
    assert len(read([config(), config()], runners=0)) == 2


def kind(name: str) -> type[Method]:
    """A quantization method that is called so."""
    return type(name, (Method,), {})


UNQUANTIZED, FP8, NVFP4, MXFP4 = (
    kind(name)
    for name in ("UnquantizedFusedMoEMethod", "Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod", "Mxfp4MoEMethod")
)
# What a layer runs, what its router hands that, and how its empty slots are taken.
SERVED: list[tuple[Method, str, str]] = [
    *((Method(name), "STANDARD", "filled") for name in ("triton", "marlin", "cutlass")),
    *((Method(name), "STANDARD", "dropped") for name in ("deep_gemm", "flashinfer_cutlass")),
    (Method("triton_kernel"), "TRITON_KERNEL", "masked"),
    *((method("flashinfer_trtllm_routed"), "STANDARD", "dropped") for method in (UNQUANTIZED, NVFP4)),
    (FP8("flashinfer_trtllm_routed", block_quant=True), "STANDARD", "dropped"),
    *((method("flashinfer_trtllm"), "BYPASSED", "dropped") for method in (UNQUANTIZED, NVFP4)),
    (FP8("flashinfer_trtllm", block_quant=True), "BYPASSED", "dropped"),
    (FP8("flashinfer_trtllm", block_quant=True), "STANDARD", "dropped"),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="trtllm_sm100"), "BYPASSED", "masked"),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm90"), "BYPASSED", "dropped"),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm120"), "BYPASSED", "dropped"),
]


def describe(case: tuple[Method, str, str]) -> str:
    method, output_format, _ = case
    return " ".join([type(method).__name__, *map(str, vars(method).values()), output_format])


@pytest.mark.parametrize("case", SERVED, ids=describe)
def test_each_layers_own_runner_says_how_its_empty_slots_are_taken(case, read):
    method, output_format, convention = case
    ((_, layer),) = read([config(FORMATS[output_format])], 1, method=method)
    assert (layer.convention, layer.routes_itself) == (convention, output_format != "STANDARD")
    assert layer.slots.empty == (convention == "dropped")
    ((_, layer),) = read([config(FORMATS[output_format])], 1, method=method, ep_dispatch_algorithm="static")
    assert layer.renumbers
    assert not layer.slots.empty, "a table of places has no entry for -1"


def test_the_table_has_a_served_layer_for_each_row():
    assert {(method.backend, convention) for method, _, convention in SERVED} == {
        (row.name, row.convention) for row in TABLE
    }


@pytest.mark.parametrize(
    "method",
    [
        *(Method(one.value) for one in MoeRunnerBackend if one.value not in ("auto", *list_runners())),
        Method("flashinfer_trtllm"),
        FP8("flashinfer_trtllm", block_quant=False),
        kind("ModelOptFp8MoEMethod")("flashinfer_trtllm"),
        kind("Mxfp4FlashinferTrtllmMoEMethod")("flashinfer_mxfp4"),
    ],
    ids=lambda method: f"{method.backend} {type(method).__name__}",
)
def test_a_runner_that_no_row_is_about_is_refused_whatever_the_flag_was(method, read):
    """`auto` is no runner: aiter keeps one slot of an expert that comes twice, of weight 0 or not."""
    line = f"experts-0 experts: {NO_POLICY}: MoE runner {method.backend} of {type(method).__name__}: "
    with pytest.raises(ExpertPolicyError, match=f"^{re.escape(line)}.*; allowed is --moe-runner-backend triton, "):
        read([config()], 1, method=method)


def test_what_runs_on_amd_is_refused_with_its_reason(read):
    with pytest.raises(ExpertPolicyError, match="moe_sorting keeps one slot of an expert that a row holds twice"):
        read([config()], 1, method="aiter")


def test_a_release_before_the_kernel_was_read_is_refused(read, monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    for method in (UNQUANTIZED("flashinfer_trtllm"), MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm90")):
        with pytest.raises(ExpertPolicyError, match=f"MoE runner {method.backend} of"):
            read([config(FORMATS.BYPASSED)], 1, method=method)
    assert "flashinfer_trtllm" not in list_runners()


TRTLLM = UNQUANTIZED("flashinfer_trtllm")
EXCEPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "its table of local experts reads -1": (
        {"method": "deep_gemm", "ep_size": 2},
        "experts-0 experts: .*MoE runner deep_gemm with expert parallelism: before 0.5.23 .*; allowed is --ep-size 1",
    ),
    "it routes a rank's own rows": (
        {"method": "flashinfer_cutlass"},
        "experts-0 experts: .*after each has routed its own; allowed is --disable-flashinfer-cutlass-moe-fp4-allgather",
    ),
    "a shared expert among the others": (
        {"method": TRTLLM, "attributes": {"num_fused_shared_experts": 1}},
        "experts-0 experts: .*a fused shared expert; allowed is --disable-shared-experts-fusion",
    ),
    "sums that the next collective takes, in bf16": (
        {"method": TRTLLM, "attributes": {"supports_deferred_finalize": True}},
        "experts-0 experts: .*leaves a row's sum over experts to the next collective",
    ),
    "sums that CuTe DSL's collective takes": (
        {
            "method": NVFP4("flashinfer_trtllm"),
            "attributes": {"supports_deferred_finalize": True},
            "flashinfer_allreduce_fusion_backend": "cutedsl",
        },
        "experts-0 experts: .*leaves a row's sum over experts to the next collective",
    ),
    "slots that another runner sorts": (
        {"method": "deep_gemm", "expert_policy_align": True},
        "topk-0 router: .*MoE runner deep_gemm sorts for itself; --expert-policy-align allows triton",
    ),
    "a kmax where rows are as wide as top-k": (
        {"method": "deep_gemm", "expert_policy": "oea", "expert_policy_config": {"kmax": 6}},
        "topk-0 router: .*kmax = 6: MoE runner deep_gemm uses top-k; allowed is 4",
    ),
}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_exceptions_to_the_table(case, read, monkeypatch):
    monkeypatch.setattr(runners, "keeps_dropped", lambda: False)
    monkeypatch.setattr(runners, "gathers_routed", lambda: True)
    given, named = EXCEPTIONS[case]
    with pytest.raises(ExpertPolicyError, match=f"^{named}"):
        read([config()], 1, **given)


def test_a_layer_that_is_handed_ids_finishes_its_sums_itself(read):
    """DeepSeek's NVFP4 layers leave them to the next collective in steps in which they route themselves."""

    def read_model(runner: Any, arguments: Any) -> Any:
        start_layers.read_layers(runner, arguments)
        return runner.model

    attributes = {"supports_deferred_finalize": True}
    for output_format, left in ((FORMATS.BYPASSED, False), (FORMATS.STANDARD, True)):
        method = NVFP4("flashinfer_trtllm")
        model = read([config(output_format)], 1, function=read_model, method=method, attributes=attributes)
        assert dict(model.named_modules())["experts-0"].supports_deferred_finalize == left


def test_ranks_that_number_their_own_experts_get_no_dropped_id(read, monkeypatch):
    """Before 0.5.23 that of a padding row, -1 by then, would be looked up too, and wake the last expert."""
    assert not read([config()], 1, ep_size=2)[0][1].renumbers
    monkeypatch.setattr(start_layers, "keeps_dropped", lambda: False)
    assert read([config()], 1, ep_size=2)[0][1].renumbers


def test_a_kernel_without_a_runner_is_not_known(read):
    with pytest.raises(ExpertPolicyError, match="a kernel of Method: which is not known"):
        read([config()], 1, method=None)


def test_older_releases_keep_the_runner_in_the_method_its_scheme_or_a_kernel():
    def runner(name: str) -> SimpleNamespace:
        return SimpleNamespace(runner_backend=MoeRunnerBackend(name))

    plain = SimpleNamespace(quant_method=SimpleNamespace(runner=runner("marlin")))
    scheme = SimpleNamespace(quant_method=SimpleNamespace(), scheme=SimpleNamespace(runner=runner("triton")))
    kernel = SimpleNamespace(runner=runner("marlin"))
    awq = SimpleNamespace(quant_method=SimpleNamespace(), scheme=SimpleNamespace(kernel=kernel))
    amd = SimpleNamespace(quant_method=SimpleNamespace(runner=runner("triton"), _aiter_runner=runner("aiter")))
    assert [find_runner(layer) for layer in (plain, scheme, awq, amd)] == ["marlin", "triton", "marlin", "aiter"]
    assert find_runner(SimpleNamespace(quant_method=SimpleNamespace())) is None


SHARED = SharedExpertsConfig(num_fused_shared_experts=1)
MOE_SPEC = {
    "expert_policy": "moe-spec",
    "expert_policy_config": {"budget": 8, "coverage": "truncate", "phases": ["decode"]},
}
UNSERVED: dict[str, tuple[list[TopKConfig], int, dict[str, Any], str]] = {
    "a layer without TopK": (
        [config()],
        2,
        {},
        f"--model-path model: {NO_POLICY}: 1 TopK modules for 2 MoE layers; allowed is one for each",
    ),
    "no layer": (
        [],
        0,
        {},
        f"--model-path model: {NO_POLICY}: 0 TopK modules for 0 MoE layers; allowed is one for each",
    ),
    "an unknown router": (
        [config(), config(scoring_func="tanh")],
        2,
        {},
        f"topk-1 router: {NO_POLICY}: scoring function 'tanh', allowed is softmax, sigmoid, sqrtsoftplus",
    ),
    "routing in the kernel": (
        [config(FORMATS.BYPASSED)],
        1,
        {},
        f"topk-0 router: {NO_POLICY}: bypassed output for MoE runner triton; allowed is standard",
    ),
    "shared experts whose slots are not sorted": (
        [config(top_k=5, use_grouped_topk=True, num_expert_group=2, topk_group=1, shared_experts=SHARED)],
        1,
        {"expert_policy_align": True},
        f"topk-0 router: {NO_POLICY}: its runner takes shared experts' slots too, which --expert-policy-align does not "
        "sort; allowed is --disable-shared-experts-fusion",
    ),
    "a share of what does not renormalize": (
        [config(), config(renormalize=False)],
        2,
        {"expert_policy": "oea", "expert_policy_config": {"own_share": 0.75}},
        f"topk-1 router: {NO_POLICY}: own_share = 0.75: allowed only with a model that renormalizes its weights",
    ),
    "truncation by a runner that ranks logits": (
        [config(FORMATS.TRITON_KERNEL)],
        1,
        MOE_SPEC | {"method": "triton_kernel"},
        f"topk-0 router: {NO_POLICY}: coverage = 'truncate': a runner that ranks logits itself renormalizes; "
        "allowed is substitute or own",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_only_a_loaded_model_shows_ends_the_process_with_one_line(case, read, capsys, monkeypatch):
    configs, runners, flags, line = UNSERVED[case]
    with pytest.raises(ExpertPolicyError, match=f"^{re.escape(line)}$"):
        read(configs, runners, **flags)
    for rank in (0, 1):
        monkeypatch.setattr(runtime_context, "get_parallel", lambda rank=rank: SimpleNamespace(tp_rank=rank))
        with pytest.raises(SystemExit) as ended:
            read(configs, runners, start_layers.find_layers, **flags)
        assert not isinstance(ended.value, Exception), "upstream logs a traceback of every Exception"
        assert ended.value.code == REFUSED
        assert capsys.readouterr().err == (f"{line}\n" if rank == 0 else ""), "ranks refuse alike"


def test_a_replica_that_refuses_its_model_is_killed_by_upstream(read):
    """SGLang's controller would wait forever for a replica that just ended; for one that raises, it ends the server."""
    with pytest.raises(ExpertPolicyError, match="0 TopK modules"):
        read([], 0, start_layers.find_layers, dp_size=2)


def test_a_pipeline_rank_need_not_have_every_layer(read):
    layers = {"expert_policy_config": {"k0": 1, "add": 4, "layers": {"7": {"k0": 2}, "0-1": {"policy": "vanilla"}}}}
    assert len(read([config(), config()], 2, pp_size=2, **layers)) == 2
    with pytest.raises(ExpertPolicyError, match="layers 7: the model's layers are 0 to 1"):
        read([config(), config()], 2, **layers)
