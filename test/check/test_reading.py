"""One report has one reading of the model: SGLang's, when it has resolved the arguments."""

import json
from functools import cache
from pathlib import Path

import pytest

from check.asking import QWEN, TINY, list_warnings, run_all
from check.shapes import SHAPES
from check.test_blocks import BLOCKS, QWEN_235B
from scripts.runners import FP8
from served.release import CPU, LATEST, older_releases_take_long
from sglang_xshare.check.server import read_flags
from sglang_xshare.check.weights import read_weights

GPU = ("--gpu", "h200")
CHANGES = '{"num_hidden_layers": 12, "num_experts_per_tok": 4}'
DRAFTS = ("--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "48")
FLAGS = {
    "overrides": ("qwen", ("--json-model-override-args", CHANGES)),
    "fp8": ("qwen", ("--quantization", "fp8")),
    "float32": ("qwen", ("--dtype", "float32")),
    "dummy": ("qwen", ("--load-format", "dummy")),
    "wrong policy": ("qwen", ("--expert-policy", "xshare:bogus=2", *DRAFTS)),
    "cut": ("235b", ("--tp", "8")),
    "whole": ("235b", ("--tp", "8", "--ep-size", "8")),
    "fewer": ("235b", ("--tp", "4")),
}
MODELS = {
    "qwen": QWEN,
    "235b": QWEN_235B,
    "deepseek": SHAPES["DeepSeek-V3"]
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    | {"quantization_config": FP8 | BLOCKS},
}


def write_models(folder):
    for name, config in MODELS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


@cache
def ask_of_flags(tree: Path, folder: Path) -> dict[str, dict]:
    """The reports on `FLAGS`, asked in one process."""
    write_models(folder)
    asked = [["--json", "--model", str(folder / model), *GPU, *flags] for model, flags in FLAGS.values()]
    answers = run_all(tree, [*asked, ["--json", "--model", str(TINY), *CPU, "--batch", "2"]])
    return {name: json.loads(answer["out"]) for name, answer in zip([*FLAGS, "tiny"], answers, strict=True)}


@pytest.fixture
def reports(patched_release, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "readings"
    folder.mkdir(exist_ok=True)
    return ask_of_flags(patched_release(LATEST), folder)


@pytest.mark.parametrize("name", ["overrides", "fp8", "float32", "dummy"])
def test_flags_that_change_the_model_change_all_of_the_report(name, reports, write):
    """And SGLang reads them as `check` does without it."""
    report, weights = reports[name], read_weights(write(QWEN), read_flags(FLAGS[name][1]))
    assert report["verdict"] == "served"
    assert report["weights"]["expert_bytes"] == weights.expert
    assert report["weights"]["other_bytes"] == weights.held
    assert report["weights"]["cache_bytes_per_token"] == weights.cache
    shape = (report["model"]["layers"], report["weights"]["moe_layers"], report["model"]["top_k"])
    assert shape == ((12, 12, 4) if name == "overrides" else (48, 48, 8))


def test_a_verdict_is_not_contradicted_as_the_model_is_built(reports):
    assert reports["cut"]["verdict"] == "refused"
    (refusal,) = reports["cut"]["refusals"]
    assert refusal["by"] == "SGLang"
    assert refusal["says"].endswith("; use --ep-size 8 or --tp 4")
    assert [reports[name]["verdict"] for name in ("whole", "fewer")] == ["served", "served"]


def test_a_wrong_policy_leaves_the_report(reports):
    """The warning about drafts, which needs the policy, is left out."""
    refusal, *_ = reports["wrong policy"]["refusals"]
    assert "bogus" in refusal["says"]


@older_releases_take_long
def test_groups_of_data_parallel_attention_are_what_sglang_resolves(release, patched_release, tmp_path):
    """0.5.22 and later resolve --dp-size 8 --enable-dp-attention to `attn_dp_size` 8 and `dp_size` 1. Each group holds
    all of the attention.
    """
    write_models(tmp_path)
    spellings = [["--dp-size", "8", "--enable-dp-attention"], *[["--attn-dp-size", "8"]] * (release == LATEST)]
    asked = [["--json", "--model", str(tmp_path / "deepseek"), *GPU, "--tp", "8", *spelt] for spelt in spellings]
    for answer in run_all(patched_release(release), asked):
        report = json.loads(answer["out"])
        weights = report["weights"]
        assert weights["gpu_bytes"] == weights["all_experts_bytes"] / 8 + weights["other_bytes"]
        assert weights["gpu_bytes"] == pytest.approx(100.7e9, rel=0.002)
        assert [line for line in list_warnings(report) if "while one rank prefills" in line]


def test_the_tiny_checkpoint_is_counted_by_its_files(reports):
    report = reports["tiny"]
    assert (report["weights"]["source"], report["model"]["experts"]) == ("safetensors", 64)
    assert report["never_executed"] == [], "a CPU's server is executed in tests"
