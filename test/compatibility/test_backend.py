"""`auto` becomes a MoE runner that a policy can be served with; one that was given stays, or is refused by name."""

import logging
import os
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compatibility.configured import server
from compatibility.refusals import resolve
from scripts.runners import FP8, GPT_OSS, KIMI, MXINT4, QWEN3, write_model
from served.release import LATEST, older_releases_take_long
from sglang_xshare.compatibility import backend, formats
from sglang_xshare.compatibility import experts as experts_module
from sglang_xshare.compatibility.experts import Experts, ranks_logits, read_experts
from sglang_xshare.compatibility.formats import Format
from sglang_xshare.refusal import ExpertPolicyError

MODELS = {  # that flashinfer_trtllm routes itself, in whichever release; no runner's kernel; ranked by triton_kernel
    "fp8": (QWEN3, FP8),
    "int4": (KIMI, MXINT4),
    "w4afp8": (QWEN3, {"quant_method": "w4afp8"}),
    "mxfp4": (GPT_OSS, GPT_OSS["quantization_config"]),
    "gpt-oss": ({key: value for key, value in GPT_OSS.items() if key != "quantization_config"}, None),
}
POLICY = ("--expert-policy", "xshare")
GIVEN = (*POLICY, "--moe-runner-backend")
ROUTED = "flashinfer_trtllm_routed"
TRUNCATE = ("--expert-policy", 'moe-spec:{"budget": 16, "coverage": "truncate", "phases": ["decode"]}')
ASKED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "fp8": ("fp8", POLICY, "flashinfer_trtllm (auto) -> triton"),
    "int4": ("int4", POLICY, "flashinfer_trtllm (auto) -> triton"),
    "masking alone": ("fp8", ("--mask-padding-experts",), "flashinfer_trtllm (auto) -> triton"),
    "a draft": ("fp8", (*POLICY, "--speculative-algorithm", "NGRAM"), "flashinfer_trtllm (auto) -> triton"),
    "no logits express it": ("gpt-oss", TRUNCATE, "triton_kernel (auto) -> triton"),
    # On sm100 its kernel ranks masked logits, which cannot keep a weight's share of experts that are left out.
    "ranked inside the kernel": ("mxfp4", TRUNCATE, "flashinfer_mxfp4 (auto) -> marlin"),
    "a runner that serves the policy": ("gpt-oss", POLICY, "triton_kernel"),
    "without a policy": ("fp8", (), "flashinfer_trtllm"),
    "vanilla": ("fp8", ("--expert-policy", "vanilla"), "flashinfer_trtllm"),
    "given": ("fp8", (*GIVEN, "triton"), "triton"),
    "given, of other experts": ("fp8", (*GIVEN, ROUTED), f"--moe-runner-backend {ROUTED}: "),
    "given, of experts with a kernel of their own": ("w4afp8", (*GIVEN, "triton"), "--moe-runner-backend triton: "),
    "given, not served": ("fp8", (*GIVEN, "flashinfer_cutedsl"), "--moe-runner-backend flashinfer_cutedsl: "),
    "no runner": ("w4afp8", POLICY, "--expert-policy xshare: SGLang runs w4afp8 experts with cutlass_w4a8_moe"),
    "does not fit the model": ("gpt-oss", ("--expert-policy", "xshare:k0=9"), "--expert-policy xshare: k0 = 9: "),
}
"""A model, the flags of its server, and its runner there: moved, SGLang's or the user's; or how its refusal begins."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of the models' configurations."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        write_model(folder / name, *model)
    return folder


@cache
def ask(tree: Path, models: Path) -> dict[str, dict[str, Any]]:
    """What becomes of each server on a B200."""
    always = ("--device", "cuda", "--load-format", "dummy")
    asked = [(*always, "--model-path", str(models / model), *flags) for model, flags, _ in ASKED.values()]
    answers = resolve(tree, models, asked, is_b200=True)
    return dict(zip(ASKED, answers, strict=True))


@older_releases_take_long
def test_a_blackwell_default_is_moved_and_said_once(release, patched_release, models):
    """What was given is kept, or refused by its name."""
    for case, answer in ask(patched_release(release), models).items():
        wanted = ASKED[case][2]
        if wanted.startswith("--"):
            assert (case, answer["ours"], answer["says"][: len(wanted)]) == (case, True, wanted)
        else:
            assert (case, answer["resolved"]["moe_runner_backend"]) == (case, wanted.rpartition(" ")[2])
        assert answer["lines"] == [f"expert policy: MoE runner {wanted}"] * (" -> " in wanted)


@older_releases_take_long
def test_the_rest_is_resolved_as_if_the_runner_had_been_given(release, patched_release, models):
    resolved = {case: answer.get("resolved") for case, answer in ask(patched_release(release), models).items()}
    assert resolved["fp8"] == resolved["given"]
    for case, disabled in {"fp8": "False", "without a policy": "True", "vanilla": "True"}.items():
        assert resolved[case]["disable_shared_experts_fusion"] == disabled


def test_the_copy_is_resolved_unnoticed(monkeypatch, caplog, recwarn):
    expert_policy = pytest.importorskip("sglang.srt.expert_policy", reason="needs an installed SGLang")
    monkeypatch.setenv("SGLANG_KEPT", "as it was")
    monkeypatch.setenv("SGLANG_GONE", "as it was")
    before = expert_policy.check_flags
    with backend._unnoticed():
        os.environ |= {"SGLANG_KEPT": "changed", "SGLANG_NEW": "1"}
        del os.environ["SGLANG_GONE"]
        logging.getLogger("sglang").critical("not heard")
        warnings.warn("not heard", stacklevel=1)
        expert_policy.check_flags(SimpleNamespace(expert_policy="nope"))  # which would refuse it
    left = [os.environ.get(f"SGLANG_{name}") for name in ("KEPT", "GONE", "NEW")]
    assert left == ["as it was", "as it was", None]
    assert expert_policy.check_flags is before
    logging.getLogger("sglang").critical("heard")
    assert caplog.messages == ["heard"]
    assert "not heard" not in [str(warning.message) for warning in recwarn]


def make_experts(form: Format, capability: tuple[int, int] | None, **others: Any) -> Experts:
    auto: dict[str, Any] = {"runner": "auto", "format": form, "capability": capability, "aiter": False, "ep_size": 1}
    return Experts(**auto | others)


FITTING: list[tuple[Format, tuple[int, int] | None, dict[str, Any], list[str]]] = [
    # gpt-oss
    (formats.MXFP4, (8, 9), {}, ["triton"]),
    (formats.MXFP4, (9, 0), {"driver": 595}, ["triton_kernel", "marlin", "triton"]),
    (formats.MXFP4, (9, 0), {"has_kernels": False}, ["marlin", "triton"]),
    (formats.MXFP4, (10, 0), {"driver": 594}, ["triton_kernel", "marlin", "triton"]),
    (formats.MXFP4, (10, 0), {"driver": 595}, ["marlin", "triton"]),
    (formats.MXFP4, (10, 0), {"ep_size": 2}, ["marlin", "triton"]),
    (formats.MXFP4, (11, 0), {}, ["marlin", "triton"]),
    (formats.MXFP4, None, {}, ["triton"]),
    (formats.MXFP4, None, {"aiter": True}, []),
    (formats.MXFP4_IN_FP8, (9, 0), {}, ["marlin"]),
    (formats.MXINT4, (7, 5), {}, ["triton"]),
    (formats.MXINT4, (8, 0), {}, ["triton", "marlin"]),
    *((formats.COMPRESSED_NVFP4, capability, {}, []) for capability in ((9, 0), (11, 0), (12, 0))),
    *((formats.COMPRESSED_NVFP4, capability, {}, ["flashinfer_trtllm"]) for capability in ((10, 0), (10, 3))),
    (Format("routed", (ROUTED,)), (9, 0), {}, []),
    (formats.BF16, None, {"aiter": True}, ["triton"]),
    *((form, None, {}, ["triton"]) for form in (formats.FP8_TENSOR, formats.FP8_CHANNEL)),
    *((form, None, {"aiter": True}, []) for form in (formats.FP8_TENSOR, formats.FP8_CHANNEL)),
    (formats.FP8_BLOCK, None, {"aiter": True}, ["triton"]),
    (formats.FP8_BLOCK, None, {"aiter": True, "release": "0.5.22"}, []),
]


@pytest.mark.parametrize(("form", "capability", "given", "runners"), FITTING, ids=str)
def test_what_fits(form, capability, given, runners, monkeypatch):
    """With a driver, triton_kernels and a release, as `given` changes them."""
    common = pytest.importorskip("sglang.srt.utils.common", reason="needs an installed SGLang")
    monkeypatch.setattr(common, "is_triton_kernels_available", lambda: given.get("has_kernels", True))
    monkeypatch.setattr(common, "get_nvidia_driver_version", lambda: (given.get("driver", 580), 1))
    monkeypatch.setattr("sglang.__version__", given.get("release", LATEST))
    others = {name: given[name] for name in ("aiter", "ep_size") if name in given}
    assert make_experts(form, capability, **others).list_fitting() == runners


def test_one_name_of_a_runner_may_stand_for_several_kernels(monkeypatch):
    monkeypatch.setattr("sglang.__version__", LATEST)
    inside = (formats.FP8_TENSOR, formats.MXINT4, *formats._COMPRESSED_FP8.values())  # they route inside that kernel
    kernels = {
        **{("flashinfer_trtllm", form): form is formats.BF16 for form in (formats.BF16, *inside)},
        ("flashinfer_mxfp4", formats.MXFP4): True,
        ("flashinfer_mxfp4", formats.MXFP4_IN_FP8): False,  # auto must become another one before DeepSeek-V4 loads
    }
    experts = [make_experts(form, (10, 0), runner=runner) for runner, form in kernels]
    assert {(one.runner, one.format): one.served for one in experts} == kernels
    monkeypatch.setattr(experts_module, "list_runners", lambda: ("triton",))
    assert not any(one.served for one in experts)


TRTLLM = make_experts(formats.FP8_TENSOR, (10, 0), runner="flashinfer_trtllm")
AITER_ALONE = make_experts(formats.FP8_TENSOR, None, runner="aiter", aiter=True)
OWN_KERNEL = make_experts(formats._NAMED["w4afp8"], (10, 0), runner="cutlass_w4a8_moe")


def test_what_is_refused_is_the_runner_that_was_given_or_else_the_policy(monkeypatch):
    monkeypatch.setattr("sglang.__version__", LATEST)
    monkeypatch.setattr(backend, "resolved", lambda server_args: server_args)
    trtllm, triton = ({"moe_runner_backend": name} for name in ("flashinfer_trtllm", "triton"))
    for flags, experts, begin, end in (
        (trtllm, TRTLLM, "--moe-runner-backend flashinfer_trtllm", "use triton"),
        (triton, OWN_KERNEL, "--moe-runner-backend triton", "use another quantization"),
        ({}, OWN_KERNEL, "--expert-policy xshare", "use experts of another quantization"),
        ({"expert_policy": None}, AITER_ALONE, "--mask-padding-experts", "use SGLANG_USE_AITER=0"),
    ):
        monkeypatch.setattr(backend, "read_experts", lambda server_args, experts=experts: experts)
        with pytest.raises(ExpertPolicyError, match=f"^{begin}: .*; {end}$"):
            backend.check_experts(server(**flags))
        backend.check_experts(server(moe_runner_backend="flashinfer_cutedsl"))  # which `check_modes` refuses


AMD, AITER = "AMD", "AMD with aiter"


@pytest.mark.parametrize(
    ("quantization", "gpu", "flags", "runner"),
    [
        ("w4afp8", None, {}, None),
        ("w4afp8", (9, 0), {"device": "cpu"}, None),
        ("w4afp8", (9, 0), {"moe_a2a_backend": "deepep"}, None),
        *(("w4afp8", (9, 0), {"moe_runner_backend": name}, "cutlass_w4a8_moe") for name in ("auto", "triton")),
        ("modelopt_fp4", (9, 0), {}, "auto"),
        *(("modelopt_fp4", capability, {}, "flashinfer_trtllm") for capability in ((10, 0), (12, 0))),
        *(("none", gpu, {}, "auto") for gpu in ((10, 0), AMD)),
        *((name, AITER, {}, "aiter") for name in ("none", "fp8", "modelopt_fp8", "mxfp4")),
        ("none", AITER, {"moe_runner_backend": "triton"}, "triton"),
        ("mxfp8", AITER, {}, "auto"),
    ],
)
def test_the_runner_that_layers_choose(quantization, gpu, flags, runner, monkeypatch):
    """None: without a GPU, and behind a dispatcher, nothing is known before layers load."""
    config = server(**{"device": "cuda", "ep_size": 2, "quantization": quantization} | flags)
    model = SimpleNamespace(hf_config=None, hf_text_config=None)
    facts = {"resolved": config, "model_config": model, "_is_amd": gpu in (AMD, AITER), "_read_capability": gpu}
    for name, fact in facts.items():
        monkeypatch.setattr(experts_module, name, lambda *_, fact=fact: fact)
    monkeypatch.setenv("SGLANG_USE_AITER", str(int(gpu != AMD)))
    experts = read_experts(config)
    assert (experts and experts.runner) == runner
    capability = None if gpu in (AMD, AITER) else gpu
    assert experts is None or (experts.capability, experts.aiter, experts.ep_size) == (capability, gpu == AITER, 2)


def test_which_runners_rank_logits(monkeypatch):
    for runner, capability, ranks in (
        ("triton_kernel", (9, 0), True),
        ("triton", (10, 0), False),
        ("flashinfer_mxfp4", (9, 0), False),
        ("flashinfer_mxfp4", (10, 0), True),
        ("flashinfer_mxfp4", (10, 3), True),
        ("flashinfer_mxfp4", (11, 0), False),
        ("flashinfer_mxfp4", None, False),
    ):
        monkeypatch.setattr(experts_module, "_read_capability", lambda capability=capability: capability)
        on_gpu, on_cpu = (server(moe_runner_backend=runner, device=device) for device in ("cuda", "cpu"))
        assert (runner, capability, ranks_logits(on_gpu)) == (runner, capability, ranks)
        assert ranks_logits(on_cpu) == (runner == "triton_kernel"), "no kernel of a GPU runs"
