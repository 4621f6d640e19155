"""What SGLang resolves for a GPU that is not there."""

import json
from functools import cache
from pathlib import Path

import pytest

from benchmark.gpu.models import COMMON, CONFIGS
from check.asking import list_warnings, run_all
from scripts.runners import FP8
from served.release import LATEST, OLDER
from sglang_xshare.check.command import _on_device
from sglang_xshare.check.server import read_flags
from sglang_xshare.gpus import GPUS

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
MODELS = {
    "bf16": COMMON | CONFIGS["qwen3-30b-a3b"],
    "awq": COMMON | CONFIGS["qwen3-30b-a3b"] | {"dtype": "float16", "quantization_config": AWQ},
    "gpt-oss": COMMON | CONFIGS["gpt-oss-20b"],
    "fp8": COMMON | CONFIGS["qwen3-30b-a3b"] | {"quantization_config": FP8},
    "w4afp8": COMMON | CONFIGS["qwen3-30b-a3b"] | {"quantization_config": {"quant_method": "w4afp8"}},
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
TWENTY_FOUR = ("--expert-policy", "xshare:k0=1,add=24")
UNFIT = "SGLang runs w4afp8 experts with cutlass_w4a8_moe here"
WITH_GPU = pytest.mark.parametrize("release", [pytest.param(OLDER[-1], marks=pytest.mark.long), LATEST])
"""The releases that can be told what GPU there is."""


@cache
def ask_of_gpus(tree: Path, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The answers for every model and GPU of `RESOLVED`."""
    return dict(zip(RESOLVED, run_all(tree, list_gpus(folder)), strict=True))


def list_gpus(folder: Path) -> list[list[str]]:
    """The arguments for every model and GPU of `RESOLVED`, of models that are written into the folder."""
    for name, config in MODELS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return [["--json", "--model", str(folder / model), "--gpu", gpu, *TWENTY_FOUR] for model, gpu in RESOLVED]


@WITH_GPU
@pytest.mark.parametrize(("model", "gpu"), RESOLVED)
def test_what_auto_becomes_on_a_gpu(model, gpu, release, patched_release, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "models"
    folder.mkdir(exist_ok=True)
    answer = ask_of_gpus(patched_release(release), folder)[model, gpu]
    report = json.loads(answer["out"])
    runner, moved, verdict = RESOLVED[model, gpu]
    lines = [line for line in list_warnings(report) if line.startswith("expert policy: ")]
    assert lines == ([f"expert policy: MoE runner {moved} (auto) -> {runner}"] if moved else [])
    assert report["moe_runner"] == runner
    assert [UNFIT in refusal["says"] for refusal in report["refusals"]] == ([True] if verdict == "refused" else [])
    assert (answer["code"], report["verdict"]) == (int(verdict != "served"), verdict)
    assert report["served"] is (verdict == "served")
    assert (report["gpu"], report["device"]) == (gpu, "cuda")


def test_another_device_is_refused_wherever_it_is_named(tmp_path):
    (tmp_path / "server.yaml").write_text("device: cpu\n")
    for flags in (["--device", "cpu"], ["--config", str(tmp_path / "server.yaml")]):
        with pytest.raises(ValueError, match="--device cpu with --gpu:"):
            _on_device(flags, read_flags(flags), GPUS["h100"])
    (tmp_path / "server.yaml").write_text("port: 3\n")
    flags = ["--config", str(tmp_path / "server.yaml")]
    assert _on_device(flags, read_flags(flags), GPUS["h100"]) == [*flags, "--device", "cuda"]
