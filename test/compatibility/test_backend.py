"""`auto` becomes a MoE runner that a policy can be served with; one that was given stays, or is refused by name."""

import logging
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.runners import FP8, GPT_OSS, KIMI, QWEN3, write_model
from scripts.runners import MXINT4 as DECLARED_MXINT4
from served.release import LATEST, OLDER, make_env, run_script
from sglang_xshare.compatibility import experts as experts_module
from sglang_xshare.compatibility.backend import _unnoticed
from sglang_xshare.compatibility.experts import Experts, ranks_logits, read_experts
from sglang_xshare.compatibility.formats import (
    BF16,
    COMPRESSED_NVFP4,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP4_IN_FP8,
    MXINT4,
    Format,
)

EACH_RELEASE = pytest.mark.parametrize(
    "release", [LATEST, *(pytest.param(release, marks=pytest.mark.long) for release in OLDER)]
)
POLICY = ("--expert-policy", "xshare")
TRUNCATE = '{"budget": 16, "coverage": "truncate", "phases": ["decode"]}'
MODELS = {  # that flashinfer_trtllm routes itself, in whichever release; no runner's kernel; ranked by triton_kernel
    "fp8": (QWEN3, FP8),
    "int4": (KIMI, DECLARED_MXINT4),
    "w4afp8": (QWEN3, {"quant_method": "w4afp8"}),
    "mxfp4": (GPT_OSS, GPT_OSS["quantization_config"]),
    "gpt-oss": ({key: value for key, value in GPT_OSS.items() if key != "quantization_config"}, None),
}
ASKED: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, POLICY) for name in MODELS if name != "mxfp4"},
    "without a policy": ("fp8", ()),
    "vanilla": ("fp8", ("--expert-policy", "vanilla")),
    "given": ("fp8", (*POLICY, "--moe-runner-backend", "triton")),
    "given, of other experts": ("fp8", (*POLICY, "--moe-runner-backend", "flashinfer_trtllm_routed")),
    "given, of experts with a kernel of their own": ("w4afp8", (*POLICY, "--moe-runner-backend", "triton")),
    "ranked inside the kernel": ("mxfp4", ("--expert-policy", "moe-spec", "--expert-policy-config", TRUNCATE)),
    "given, not served": ("fp8", (*POLICY, "--moe-runner-backend", "flashinfer_cutedsl")),
    "no logits express it": ("gpt-oss", ("--expert-policy", "moe-spec", "--expert-policy-config", TRUNCATE)),
    "does not fit the model": ("gpt-oss", ("--expert-policy", "xshare:k0=9")),
    "masking alone": ("fp8", ("--mask-padding-experts",)),
    "a draft": ("fp8", (*POLICY, "--speculative-algorithm", "NGRAM")),
}
MOVED = {  # to, from
    "fp8": ("triton", "flashinfer_trtllm"),
    "int4": ("triton", "flashinfer_trtllm"),
    "no logits express it": ("triton", "triton_kernel"),
    "masking alone": ("triton", "flashinfer_trtllm"),
    "a draft": ("triton", "flashinfer_trtllm"),
    # On sm100 its kernel ranks masked logits, which cannot keep a weight's share of experts that are left out.
    "ranked inside the kernel": ("marlin", "flashinfer_mxfp4"),
}
UNFIT = "Refused: --expert-policy xshare: SGLang runs w4afp8 experts with cutlass_w4a8_moe here"


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
    asked = [["--model-path", str(models / model), *always, *flags] for model, flags in ASKED.values()]
    answers = run_script(Path(__file__).with_name("resolve_runner.py"), make_env(tree), asked)
    return dict(zip(ASKED, answers, strict=True))


@EACH_RELEASE
def test_a_blackwell_default_is_moved_and_said_once(release, patched_release, models):
    answers = ask(patched_release(release), models)
    for case, (to, before) in MOVED.items():
        answer = answers[case]
        assert (case, answer["stops"]) == (case, None)
        assert answer["resolved"]["moe_runner_backend"] == to
        assert answer["lines"] == [f"expert policy: MoE runner {before} (auto) -> {to}"]


@EACH_RELEASE
def test_the_rest_is_resolved_as_if_the_runner_had_been_given(release, patched_release, models):
    answers = ask(patched_release(release), models)
    moved, given = answers["fp8"], answers["given"]
    assert given["lines"] == []
    assert moved["resolved"] == given["resolved"]
    assert moved["resolved"]["disable_shared_experts_fusion"] == "False"


@EACH_RELEASE
def test_without_a_policy_nothing_changes(release, patched_release, models):
    answers = ask(patched_release(release), models)
    for case in ("without a policy", "vanilla"):
        resolved = answers[case]["resolved"]
        assert (resolved["moe_runner_backend"], answers[case]["lines"]) == ("flashinfer_trtllm", [])
        assert resolved["disable_shared_experts_fusion"] == "True"


@EACH_RELEASE
def test_only_a_runner_that_was_given_is_refused_by_name(release, patched_release, models):
    answers = ask(patched_release(release), models)
    named = "Refused: --moe-runner-backend "
    assert answers["given, not served"]["stops"].startswith(f"{named}flashinfer_cutedsl: ")
    assert answers["given, of other experts"]["stops"].startswith(f"{named}flashinfer_trtllm_routed: ")
    assert answers["given, of experts with a kernel of their own"]["stops"].startswith(f"{named}triton: ")
    assert answers["w4afp8"]["stops"].startswith(UNFIT)
    assert (answers["gpt-oss"]["stops"], answers["gpt-oss"]["lines"]) == (None, []), "its runner serves the policy"
    unfit = answers["does not fit the model"]
    assert unfit["stops"].startswith("Refused: --expert-policy xshare: k0 = 9: ")
    assert (unfit["lines"], answers["w4afp8"]["lines"]) == ([], [])


def test_the_copy_is_resolved_unnoticed(monkeypatch, caplog):
    expert_policy = pytest.importorskip("sglang.srt.expert_policy", reason="needs an installed SGLang")
    monkeypatch.setenv("SGLANG_KEPT", "as it was")
    monkeypatch.setenv("SGLANG_GONE", "as it was")
    before = expert_policy.check_flags
    with _unnoticed():
        os.environ |= {"SGLANG_KEPT": "changed", "SGLANG_NEW": "1"}
        del os.environ["SGLANG_GONE"]
        logging.getLogger("sglang").critical("not heard")
        expert_policy.check_flags(SimpleNamespace(expert_policy="nope"))  # which would refuse it
    assert (os.environ["SGLANG_KEPT"], os.environ["SGLANG_GONE"]) == ("as it was", "as it was")
    assert "SGLANG_NEW" not in os.environ
    assert expert_policy.check_flags is before
    logging.getLogger("sglang").critical("heard")
    assert caplog.messages == ["heard"]


def make_experts(form: Format, capability: tuple[int, int] | None, **others: Any) -> Experts:
    auto: dict[str, Any] = {"runner": "auto", "format": form, "capability": capability, "aiter": False, "ep_size": 1}
    return Experts(**auto | others)


@pytest.fixture
def kernels(monkeypatch):
    """A machine with triton_kernels, and the driver it returns the setter of."""
    common = pytest.importorskip("sglang.srt.utils.common", reason="needs an installed SGLang")
    monkeypatch.setattr(common, "is_triton_kernels_available", lambda: True)
    return lambda *version: monkeypatch.setattr(common, "get_nvidia_driver_version", lambda: version)


@pytest.mark.parametrize(
    ("capability", "driver", "ep_size", "runners"),
    [
        ((8, 9), 580, 1, ["triton"]),
        ((9, 0), 595, 1, ["triton_kernel", "marlin", "triton"]),
        ((10, 0), 594, 1, ["triton_kernel", "marlin", "triton"]),
        ((10, 0), 595, 1, ["marlin", "triton"]),
        ((10, 0), 580, 2, ["marlin", "triton"]),
        ((11, 0), 580, 1, ["marlin", "triton"]),
        (None, 0, 1, []),
    ],
)
def test_what_fits_gpt_oss(capability, driver, ep_size, runners, kernels):
    kernels(driver, 1)
    experts = make_experts(MXFP4, capability, ep_size=ep_size, aiter=capability is None)
    assert experts.list_fitting() == runners


def test_what_fits_gpt_oss_without_triton_kernels(kernels, monkeypatch):
    kernels(580, 1)
    monkeypatch.setattr("sglang.srt.utils.common.is_triton_kernels_available", lambda: False)
    assert make_experts(MXFP4, (9, 0)).list_fitting() == ["marlin", "triton"]


@pytest.mark.parametrize(
    ("form", "capability", "runners"),
    [
        (MXINT4, (7, 5), ["triton"]),
        (MXINT4, (8, 0), ["triton", "marlin"]),
        *((COMPRESSED_NVFP4, capability, []) for capability in ((9, 0), (11, 0), (12, 0))),
        *((COMPRESSED_NVFP4, capability, ["flashinfer_trtllm"]) for capability in ((10, 0), (10, 3))),
        (Format("routed", ("flashinfer_trtllm_routed",)), (9, 0), []),
        (MXFP4, None, ["triton"]),
    ],
    ids=str,
)
def test_what_fits_other_experts(form, capability, runners):
    assert make_experts(form, capability).list_fitting() == runners


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
        ("none", AITER, {}, "aiter"),
        ("none", AITER, {"moe_runner_backend": "triton"}, "triton"),
        ("mxfp8", AITER, {}, "auto"),
    ],
)
def test_the_runner_that_layers_choose(quantization, gpu, flags, runner, monkeypatch):
    """None: without a GPU, and behind a dispatcher, nothing is known before layers load."""
    given = {"device": "cuda", "moe_a2a_backend": "none", "moe_runner_backend": "auto", "ep_size": 1}
    config = SimpleNamespace(**given | {"quantization": quantization} | flags)
    model = SimpleNamespace(hf_config=None, hf_text_config=None)
    facts = {"resolved": config, "model_config": model, "_is_amd": gpu in (AMD, AITER), "_read_capability": gpu}
    for name, fact in facts.items():
        monkeypatch.setattr(experts_module, name, lambda *_, fact=fact: fact)
    monkeypatch.setenv("SGLANG_USE_AITER", str(int(gpu != AMD)))
    experts = read_experts(config)
    assert (experts and experts.runner) == runner
    assert experts is None or experts.aiter == (gpu == AITER)


def test_what_aiter_leaves_to_triton(monkeypatch):
    assert make_experts(BF16, None, aiter=True).list_fitting() == ["triton"]
    for form in (FP8_TENSOR, FP8_CHANNEL):
        assert make_experts(form, None, aiter=True).list_fitting() == []
        assert make_experts(form, None).list_fitting() == ["triton"]
    for release, runners in (("0.5.22", []), ("0.5.23", ["triton"])):
        monkeypatch.setattr("sglang.__version__", release)
        assert make_experts(FP8_BLOCK, None, aiter=True).list_fitting() == runners


def test_it_follows_the_runners_that_are_served(monkeypatch):
    monkeypatch.setattr(experts_module, "list_runners", lambda: ("triton",))
    assert not make_experts(BF16, (10, 0), runner="flashinfer_trtllm").served
    monkeypatch.setattr(experts_module, "list_runners", lambda: ("triton", "flashinfer_trtllm"))
    assert make_experts(BF16, (10, 0), runner="flashinfer_trtllm").served
    for form in (FP8_TENSOR, MXINT4):  # there it routes inside its kernel
        assert not make_experts(form, (10, 0), runner="flashinfer_trtllm").served
    assert make_experts(COMPRESSED_NVFP4, (10, 0)).list_fitting() == ["flashinfer_trtllm"]
    assert make_experts(COMPRESSED_NVFP4, (12, 0)).list_fitting() == []


def test_one_name_of_a_runner_may_stand_for_several_kernels(kernels):
    """gpt-oss's flashinfer_mxfp4 is followed, DeepSeek-V4's is not: auto must become another one before it loads."""
    kernels(580, 1)
    assert make_experts(MXFP4, (9, 0), runner="flashinfer_mxfp4").served
    deepseek = make_experts(MXFP4_IN_FP8, (9, 0), runner="flashinfer_mxfp4")
    assert (deepseek.served, deepseek.list_fitting()) == (False, ["marlin"])


@pytest.mark.parametrize(
    ("runner", "capability", "ranks"),
    [
        ("triton_kernel", (9, 0), True),
        ("triton", (10, 0), False),
        ("flashinfer_mxfp4", (9, 0), False),
        ("flashinfer_mxfp4", (10, 0), True),
        ("flashinfer_mxfp4", (10, 3), True),
        ("flashinfer_mxfp4", (11, 0), False),
        ("flashinfer_mxfp4", None, False),
    ],
)
def test_which_runners_rank_logits(runner, capability, ranks, monkeypatch):
    monkeypatch.setattr(experts_module, "_read_capability", lambda: capability)
    assert ranks_logits(SimpleNamespace(moe_runner_backend=runner, device="cuda")) == ranks
    on_cpu = SimpleNamespace(moe_runner_backend=runner, device="cpu")
    assert ranks_logits(on_cpu) == (runner == "triton_kernel"), "no kernel of a GPU runs"
