"""The widened model: made once, whole or not at all, and of the shipped checkpoint's function."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmark.common.paths import TRAINED
from benchmark.common.widened import FACTOR, STAMP, make, read_widened
from benchmark.quality.text import load_sequences
from sglang_xshare.check.weights import read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The widened model at its full size."""
    folder = tmp_path_factory.mktemp("widened") / "model"
    assert make(folder)
    return folder


@torch.inference_mode()
def run(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [sequences, tokens, vocabulary] and each layer's top-8 experts [layers, sequences * tokens, 8], sorted."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = model(tokens, output_router_logits=True)
    return out.logits, torch.stack(out.router_logits).topk(8).indices.sort().values


def test_logits_and_routing_are_the_shipped_checkpoints(folder: Path) -> None:
    tokens = load_sequences(TRAINED / "heldout", TRAINED, length=48, per_domain=2).tokens
    (logits, experts), (wide_logits, wide_experts) = run(TRAINED, tokens), run(folder, tokens)
    # The sum over 64 copies of each neuron rounds otherwise; logits are as large as 20.
    torch.testing.assert_close(wide_logits, logits, rtol=0, atol=1e-4)
    assert torch.equal(wide_experts, experts)


def test_a_step_reads_the_widened_experts_and_nothing_more(folder: Path) -> None:
    file = "model.safetensors"
    with safe_open(TRAINED / file, "pt") as shipped, safe_open(folder / file, "pt") as wide:
        names = set(wide.keys())
        assert names == set(shipped.keys())
        sizes = {
            (".experts." in name, wide.get_tensor(name).numel() / shipped.get_tensor(name).numel()) for name in names
        }
    assert sizes == {(True, FACTOR), (False, 1)}
    assert read_widened().expert == 2 * read_weights(folder).expert == 4 * 3 * 32 * FACTOR * 128


def test_another_factor_or_checkpoint_is_made_anew(tmp_path: Path) -> None:
    folder, source = tmp_path / "model", tmp_path / "source"
    assert make(folder, factor=2)
    assert make(folder, factor=4)
    assert json.loads((folder / "config.json").read_text())["moe_intermediate_size"] == 4 * 32
    shutil.copytree(TRAINED, source)
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert make(folder, source, factor=4)
    assert torch.equal(load_file(folder / "model.safetensors")["model.norm.weight"], weights["model.norm.weight"])
    (folder / STAMP).unlink()  # as those that were made before there was one
    assert make(folder, source, factor=4)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "source"}
