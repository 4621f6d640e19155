"""Which row of the table of runners a loaded layer gets, how its empty slots are taken, and what has no row."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refused import refused
from sglang_xshare.compatibility import layers as start_layers
from sglang_xshare.compatibility import runners
from sglang_xshare.compatibility.modes import check_modes
from sglang_xshare.compatibility.runners import TABLE, list_runners
from sglang_xshare.stage.layer import DROPPED, FILLED, MASKED, Convention
from sglang_xshare.types import SCORINGS
from sglang_xshare.upstream.routing import find_runner, folds_scaling

pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
import sglang
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeRunnerBackend

from compatibility.configured import server
from compatibility.loaded import FORMATS, FP8, MXFP4, NVFP4, UNQUANTIZED, Method, config, find, kind

# What a layer runs, what its router hands that, and how its empty slots are taken.
SERVED: list[tuple[Method, str, Convention]] = [
    *((Method(name), "STANDARD", FILLED) for name in ("triton", "marlin", "cutlass")),
    *((Method(name), "STANDARD", DROPPED) for name in ("deep_gemm", "flashinfer_cutlass")),
    (Method("triton_kernel"), "TRITON_KERNEL", MASKED),
    *((method("flashinfer_trtllm_routed"), "STANDARD", DROPPED) for method in (UNQUANTIZED, NVFP4)),
    (FP8("flashinfer_trtllm_routed", block_quant=True), "STANDARD", DROPPED),
    *((method("flashinfer_trtllm"), "BYPASSED", DROPPED) for method in (UNQUANTIZED, NVFP4)),
    (FP8("flashinfer_trtllm", block_quant=True), "BYPASSED", DROPPED),
    (FP8("flashinfer_trtllm", block_quant=True), "STANDARD", DROPPED),
    (type("Own", (UNQUANTIZED,), {})("flashinfer_trtllm"), "BYPASSED", DROPPED),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="trtllm_sm100"), "BYPASSED", MASKED),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm90"), "BYPASSED", DROPPED),
    (MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm120"), "BYPASSED", DROPPED),
]


def describe(case: tuple[Method, str, Convention]) -> str:
    method, output_format, _ = case
    return " ".join([type(method).__name__, *map(str, vars(method).values()), output_format])


@pytest.mark.parametrize("case", SERVED, ids=describe)
def test_each_layers_own_runner_says_how_its_empty_slots_are_taken(case, read):
    method, output_format, convention = case
    (layer,) = read([config(FORMATS[output_format])], method=method)
    assert (layer.convention, layer.runner_ranks_logits) == (convention, output_format != "STANDARD")
    assert layer.slots.empty == (convention == DROPPED)
    (layer,) = read([config(FORMATS[output_format])], method=method, ep_dispatch_algorithm="static")
    assert layer.renumbers
    assert not layer.slots.empty, "a table of places has no entry for -1"


def test_the_table_has_a_served_layer_for_each_row():
    served = {(method.backend, convention) for method, _, convention in SERVED}
    assert served == {(row.name, row.convention) for row in TABLE}


def test_a_release_before_the_kernel_was_read_is_refused(read, monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    for method in (UNQUANTIZED("flashinfer_trtllm"), MXFP4("flashinfer_mxfp4", _fi_kernel="cutlass_sm90")):
        with refused("experts-0 experts"):
            read([config(FORMATS.BYPASSED)], method=method)
    for name in ("flashinfer_trtllm", "flashinfer_mxfp4"):
        assert name not in list_runners()
        with refused(f"--moe-runner-backend {name}") as raised:
            check_modes(server(moe_runner_backend=name))
        assert "is served from SGLang 0.5.23 on" in str(raised.value)


def test_a_kernel_is_known_by_the_scheme_of_its_method(read):
    attributes = {"scheme": kind("CompressedTensorsW4A4Nvfp4MoE")(None)}
    (layer,) = read([config(FORMATS.BYPASSED)], method="flashinfer_trtllm", attributes=attributes)
    assert layer.convention == DROPPED


def test_what_one_runner_must_not_have_others_may(read):
    shared = {"num_fused_shared_experts": 1, "supports_deferred_finalize": True}
    (layer,) = read([config()], method=UNQUANTIZED("triton"), attributes=shared)
    assert layer.convention == FILLED


UNKNOWN = [
    *(Method(one.value) for one in MoeRunnerBackend if one.value not in ("auto", *list_runners())),
    Method("flashinfer_trtllm"),
    FP8("flashinfer_trtllm", block_quant=False),
    kind("ModelOptFp8MoEMethod")("flashinfer_trtllm"),
    kind("Mxfp4FlashinferTrtllmMoEMethod")("flashinfer_mxfp4"),
]
SUMS = {"attributes": {"supports_deferred_finalize": True}}
OEA = {"expert_policy": "oea", "expert_policy_config": {"kmax": 6}}
TRTLLM = {"method": UNQUANTIZED("flashinfer_trtllm")}
# Layers that no row of the table is about, whatever the flag was (`auto` is no runner); and exceptions to the table.
REFUSED: dict[str, dict[str, Any]] = {
    **{f"{method.backend} {type(method).__name__}": {"method": method} for method in UNKNOWN},
    "a kernel without a runner": {"method": None},
    "its table of local experts reads -1": {"method": "deep_gemm", "ep_size": 2},
    "it routes a rank's own rows": {"method": "flashinfer_cutlass"},
    "a shared expert among the others": TRTLLM | {"attributes": {"num_fused_shared_experts": 1}},
    "sums that the next collective takes, in bf16": TRTLLM | SUMS,
    "sums that CuTe DSL's collective takes": (
        {"method": NVFP4("flashinfer_trtllm"), "flashinfer_allreduce_fusion_backend": "cutedsl"} | SUMS
    ),
    "a kmax where rows are as wide as top-k": OEA | {"method": "deep_gemm"},
}


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)
    monkeypatch.setattr(runners, "keeps_dropped", lambda: False)
    monkeypatch.setattr(runners, "gathers_routed", lambda: True)
    find([config()], **REFUSED[case])


def test_a_layer_that_is_handed_ids_finishes_its_sums_itself(read):
    """DeepSeek's NVFP4 layers leave them to the next collective in steps in which they route themselves."""

    def load(find_or_read: Callable[..., Any]) -> Callable[..., list[bool]]:
        def leave_sums(runner: Any, arguments: Any) -> list[bool]:
            find_or_read(runner, arguments)
            experts = (module for name, module in runner.model.named_modules() if name.startswith("experts"))
            return [module.supports_deferred_finalize for module in experts]

        return leave_sums

    configs = [config(FORMATS.BYPASSED), config(FORMATS.STANDARD)]
    given = {"method": NVFP4("flashinfer_trtllm"), "attributes": {"supports_deferred_finalize": True}}
    assert read(configs, 2, function=load(start_layers.read_layers), **given) == [True, True]
    assert read(configs, 2, function=load(lambda runner, _: start_layers.find_layers(runner)), **given) == [False, True]


def test_ranks_that_number_their_own_experts_get_no_dropped_id(read, monkeypatch):
    """Before 0.5.23 that of a padding row, -1 by then, would be looked up too, and make the last expert active."""
    assert not read([config()], ep_size=2)[0].renumbers
    monkeypatch.setattr(start_layers, "keeps_dropped", lambda: False)
    assert read([config()], ep_size=2)[0].renumbers
    assert not read([config()])[0].renumbers, "one rank numbers nothing"
    assert not read([config()], method="flashinfer_cutlass", ep_size=2)[0].renumbers


@pytest.mark.parametrize("ranks", [1, 2])
def test_deep_gemm_is_served_on_ranks_that_keep_an_empty_slot_empty(ranks, read, monkeypatch):
    """Before 0.5.23 one rank has no table of local experts, which an id of -1 would be looked up in."""
    monkeypatch.setattr(runners, "keeps_dropped", lambda: ranks > 1)
    (layer,) = read([config()], method=Method("deep_gemm"), ep_size=ranks)
    assert layer.convention == DROPPED


def test_on_amd_slots_are_filled_once_more_behind_upstreams_padding(read, monkeypatch):
    """Which has expert 0 by then, that no other row may use."""
    monkeypatch.setattr(topk, "_is_hip", True)
    assert read([config()])[0].renumbers


def test_on_amd_a_router_scales_what_no_model_scales_behind_it(read, monkeypatch):
    """aiter's routers do so whatever the config says. One whose model scales later would be 2.5 times too small."""
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    biased = {**grouped, "correction_bias": torch.zeros(16)}
    for changes, scaling in ((biased, 2.5), (grouped, 1.0), ({"routed_scaling_factor": 2.5}, 1.0)):
        for uses_aiter, expected in ((True, scaling), (False, 1.0)):
            monkeypatch.setattr(topk, "_use_aiter", uses_aiter)
            assert read([config(**changes)])[0].router.scaling == expected


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("on_output", [False, True])
@pytest.mark.parametrize("kind", ["plain", "biased", "grouped", "grouped biased"])
def test_upstream_agrees_on_what_aiter_scales(kind, on_output, scoring, monkeypatch):
    monkeypatch.setattr(topk, "_use_aiter", True)
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2} if "grouped" in kind else {}
    changes = {"correction_bias": torch.zeros(16) if "biased" in kind else None, **groups}
    given = config(scoring_func=scoring, apply_routed_scaling_factor_on_output=on_output, **changes)
    assert (on_output or folds_scaling(given)) == topk.is_routed_scaling_factor_fused_in_topk(given)


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


def test_a_dispatcher_leaves_out_what_its_runner_would_not(read, monkeypatch):
    """Whatever runs the experts, which gets what was dispatched: of Triton's kernels alone a slot would be filled."""
    monkeypatch.setattr(runners, "keeps_dropped", lambda: False)  # of which deep_gemm's local experts would be a reason
    for changes, shared, renumbers in (
        ({}, 0, False),
        ({"method": "deep_gemm"}, 0, False),
        ({"ep_dispatch_algorithm": "static"}, 0, True),
        ({}, 1, True),
    ):
        monkeypatch.setattr(start_layers, "num_shared_slots", lambda topk_config, shared=shared: shared)
        (layer,) = read([config()], moe_a2a_backend="deepep", **{"ep_size": 4, **changes})
        found = layer.convention, layer.renumbers, layer.runner_ranks_logits
        assert (changes, shared, *found) == (changes, shared, DROPPED, renumbers, False)
