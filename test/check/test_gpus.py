"""`check --gpu` asks SGLang to resolve the flags for another GPU, and the whole report uses SGLang's model."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmark.gpu.models import COMMON, CONFIGS
from check.asking import QWEN, TINY, list_warnings, pipe, run_all
from check.published import read_shape
from check.test_blocks import BLOCKS, QWEN_235B
from compatibility.configured import write_configs
from scripts.runners import FP8
from served.release import CPU, LATEST, OLDER, older_releases_take_long
from sglang_xshare.check.command import _on_device
from sglang_xshare.check.server import read_flags
from sglang_xshare.check.weights import read_weights
from sglang_xshare.gpus import GPUS

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
MODELS = {
    "bf16": QWEN,
    "awq": QWEN | {"dtype": "float16", "quantization_config": AWQ},
    "gpt-oss": COMMON | CONFIGS["gpt-oss-20b"],
    "fp8": QWEN | {"quantization_config": FP8},
    "w4afp8": QWEN | {"quantization_config": {"quant_method": "w4afp8"}},
    "235b": QWEN_235B,
    "deepseek": read_shape("DeepSeek-V3")
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "quantization_config": FP8 | BLOCKS},
}
RESOLVED = {  # by model and GPU: the runner at server level, SGLang's where it is moved, the verdict
    ("bf16", "a100"): ("auto", None, "served"),
    ("bf16", "h100"): ("auto", None, "served"),
    ("bf16", "rtx5090"): ("auto", None, "does not fit"),
    ("awq", "h100"): ("auto", None, "served"),
    ("gpt-oss", "h100"): ("triton_kernel", None, "served"),
    ("fp8", "b200"): ("triton", "flashinfer_trtllm", "served"),
    ("w4afp8", "h100"): ("auto", None, "refused"),
}
OEA = ("--expert-policy", "oea", "--expert-policy-config")
TWENTY_FOUR = ("--expert-policy", "xshare:k0=1,add=24")
UNFIT = "SGLang runs w4afp8 experts with cutlass_w4a8_moe here"
WITH_GPU = pytest.mark.parametrize("release", [pytest.param(OLDER[-1], marks=pytest.mark.long), LATEST])
"""The releases that can be told what GPU there is."""
CHANGES = '{"num_hidden_layers": 12, "num_experts_per_tok": 4}'
DRAFTS = ("--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "48")
FLAGS = {  # of servers on an H200
    "overrides": ("bf16", ("--json-model-override-args", CHANGES)),
    "quantized": ("bf16", ("--quantization", "fp8")),
    "float32": ("bf16", ("--dtype", "float32")),
    "dummy": ("bf16", ("--load-format", "dummy")),
    "wrong policy": ("bf16", ("--expert-policy", "xshare:bogus=2", *DRAFTS)),
    "cut": ("235b", ("--tp", "8")),
    "whole": ("235b", ("--tp", "8", "--ep-size", "8")),
    "fewer": ("235b", ("--tp", "4")),
    "converted by auto": ("gpt-oss", ("--tp", "2", "--ep-size", "2")),
    "converted": ("gpt-oss", ("--moe-runner-backend", "triton")),
}


@cache
def ask(tree: Path, folder: Path) -> dict[Any, dict[str, Any]]:
    """The reports and exit codes of `RESOLVED`, of `FLAGS` and of the small checkpoint, asked in one process."""
    servers: dict[Any, tuple[str, ...]] = {
        **{(model, gpu): (str(folder / model), "--gpu", gpu, *TWENTY_FOUR) for model, gpu in RESOLVED},
        **{name: (str(folder / model), "--gpu", "h200", *flags) for name, (model, flags) in FLAGS.items()},
        "tiny": (str(TINY), *CPU, "--batch", "2", *OEA, pipe('{"k0": 3}')),
    }
    answers = run_all(tree, [["--json", "--model", *flags] for flags in servers.values()])
    return {case: json.loads(one["out"]) | {"code": one["code"]} for case, one in zip(servers, answers, strict=True)}


@pytest.fixture
def reports(patched_release, tmp_path_factory):
    """Call it with a release for its reports."""
    folder = write_configs(tmp_path_factory.getbasetemp() / "models", MODELS)
    return lambda release: ask(patched_release(release), folder)


@WITH_GPU
@pytest.mark.parametrize(("model", "gpu"), RESOLVED)
def test_what_auto_becomes_on_a_gpu(model, gpu, release, reports):
    report = reports(release)[model, gpu]
    runner, moved, verdict = RESOLVED[model, gpu]
    lines = [line for line in list_warnings(report) if line.startswith("expert policy: ")]
    assert lines == ([f"expert policy: MoE runner {moved} (auto) -> {runner}"] if moved else [])
    assert [UNFIT in refusal["says"] for refusal in report["refusals"]] == ([True] if verdict == "refused" else [])
    wanted = {"moe_runner": runner, "verdict": verdict, "code": int(verdict != "served"), "gpu": gpu, "device": "cuda"}
    assert report.items() >= wanted.items()
    assert report["served"] is (verdict == "served")


def test_another_device_is_refused_wherever_it_is_named(tmp_path):
    (tmp_path / "server.yaml").write_text("device: cpu\n")
    for flags in (["--device", "cpu"], ["--config", str(tmp_path / "server.yaml")]):
        with pytest.raises(ValueError, match="--device cpu with --gpu:"):
            _on_device(flags, read_flags(flags), GPUS["h100"])
    (tmp_path / "server.yaml").write_text("port: 3\n")
    flags = ["--config", str(tmp_path / "server.yaml")]
    assert _on_device(flags, read_flags(flags), GPUS["h100"]) == [*flags, "--device", "cuda"]


@pytest.mark.parametrize("name", ["overrides", "quantized", "float32", "dummy"])
def test_flags_that_change_the_model_change_all_of_the_report(name, reports, write):
    """And SGLang reads them as `check` does without it."""
    report, weights = reports(LATEST)[name], read_weights(write(QWEN), read_flags(FLAGS[name][1]))
    assert report["verdict"] == "served"
    wanted = {"expert_bytes": weights.expert, "other_bytes": weights.held, "cache_bytes_per_token": weights.cache}
    assert report["weights"].items() >= wanted.items()
    shape = (report["model"]["layers"], report["weights"]["moe_layers"], report["model"]["top_k"])
    assert shape == ((12, 12, 4) if name == "overrides" else (48, 48, 8))


def test_a_verdict_is_not_contradicted_as_the_model_is_built(reports):
    verdicts = {name: reports(LATEST)[name]["verdict"] for name in ("cut", "whole", "fewer")}
    assert verdicts == {"cut": "refused", "whole": "served", "fewer": "served"}
    (refusal,) = reports(LATEST)["cut"]["refusals"]
    assert refusal["by"] == "SGLang"
    assert refusal["says"].endswith("; use --ep-size 8 or --tp 4")


@pytest.mark.parametrize(("case", "bits"), [("converted by auto", 16), ("converted", 16), (("gpt-oss", "h100"), 4.25)])
def test_mxfp4_experts_are_in_bf16_where_triton_runs_them(case, bits, reports):
    weights = reports(LATEST)[case]["weights"]
    assert weights["bits_per_expert_weight"] == bits
    assert weights["expert_bytes"] == 3 * (2880 + 1) * 2880 * bits / 8, "with a bias for each row"


def test_a_wrong_policy_leaves_the_report(reports):
    """The warning about drafts, which needs the policy, is left out."""
    refusal, *_ = reports(LATEST)["wrong policy"]["refusals"]
    assert "bogus" in refusal["says"]


@older_releases_take_long
def test_groups_of_data_parallel_attention_are_what_sglang_resolves(release, patched_release, tmp_path):
    """0.5.22 and later resolve --dp-size 8 --enable-dp-attention to `attn_dp_size` 8 and `dp_size` 1. Each group holds
    all of the attention.
    """
    model = str(write_configs(tmp_path, MODELS) / "deepseek")
    spellings = [["--dp-size", "8", "--enable-dp-attention"], *[["--attn-dp-size", "8"]] * (release == LATEST)]
    asked = [["--json", "--model", model, "--gpu", "h200", "--tp", "8", *spelt] for spelt in spellings]
    for answer in run_all(patched_release(release), asked):
        report = json.loads(answer["out"])
        weights = report["weights"]
        assert weights["gpu_bytes"] == weights["all_experts_bytes"] / 8 + weights["other_bytes"]
        assert weights["gpu_bytes"] == pytest.approx(100.7e9, rel=0.002)
        assert [line for line in list_warnings(report) if "while one rank prefills" in line]


def test_the_tiny_checkpoint_is_counted_by_its_files(reports):
    report = reports(LATEST)["tiny"]
    assert (report["weights"]["source"], report["model"]["experts"]) == ("safetensors", 64)
    assert report["never_executed"] == [], "a CPU's server is executed in tests"


def test_a_policys_file_is_read_once(reports):
    report = reports(LATEST)["tiny"]
    assert (report["verdict"], report["not_answered"], report["plan"]["k0"]) == ("served", [], 3)
    assert report["estimate"]["estimates"][0]["policy"].startswith("oea /proc/")
