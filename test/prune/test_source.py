"""Checkpoints by the names of their tensors: what can be pruned, and one line for what cannot."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_xshare.prune.source import read_source

CONFIG = {"architectures": ["M"], "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2}
BLOCK = "model.layers.{}.mlp."
NAMES = [f"{BLOCK.format(layer)}experts.{expert}.up_proj.weight" for layer in (1, 2) for expert in range(4)]
NAMES += [f"{BLOCK.format(layer)}gate.weight" for layer in (1, 2)]
OTHERS = ["model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.shared_expert_gate.weight", "lm_head.weight"]


def write(folder: Path, names: list[str], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({name: torch.zeros(4, 1) for name in names}, folder / "model.safetensors")
    return folder


def test_layers_with_experts_are_found(tmp_path):
    source = read_source(write(tmp_path, [*NAMES, *OTHERS]))
    assert source.blocks == {1: "model.layers.1.mlp.", 2: "model.layers.2.mlp."}
    assert sorted(source.shards["model.safetensors"]) == sorted([*NAMES, *OTHERS])


@pytest.mark.parametrize(
    ("names", "config", "line"),
    [
        (NAMES[1:], {}, "model.layers.1.mlp.: 3 experts; allowed are 4, as configured"),
        (NAMES, {"num_experts": 5}, "model.layers.1.mlp.: 4 experts; allowed are 5, as configured"),
        (NAMES[:-1], {}, "no model.layers.2.mlp.gate.weight; allowed is a router of that name"),
        ([*NAMES, f"{BLOCK.format(1)}moe_statics.bias"], {}, "model.layers.1.mlp.moe_statics.bias: not known whether"),
        ([*NAMES, *(f"mtp.{name}" for name in NAMES)], {}, "several blocks of experts in one layer: model.layers.1"),
        (OTHERS, {}, "no tensor of a single expert, as where all are packed in one"),
        (NAMES, {"norm_topk_prob": False}, "norm_topk_prob = false: a softmax over fewer experts"),
        (NAMES, {"n_group": 2, "topk_group": 1}, "topk_group = 1 of n_group = 2: a group's rank depends"),
        (NAMES, {"quantization_config": {"ignore": [NAMES[0]]}}, "config.json names single experts"),
        (NAMES, {"num_experts": [4, 4, 4]}, "config.json: the number of experts by layer; allowed is one for all"),
        (NAMES, {"num_experts": 1}, "M is a dense model"),
    ],
)
def test_what_cannot_be_pruned_is_one_line(names, config, line, tmp_path):
    with pytest.raises(ValueError, match=re.escape(line)) as refused:
        read_source(write(tmp_path, names, **config))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [{"norm_topk_prob": False}, {"n_group": 2, "topk_group": 2}])
def test_sigmoid_scores_and_groups_that_are_all_chosen_are_taken(config, tmp_path):
    biased = [*NAMES, *(f"{BLOCK.format(layer)}gate.e_score_correction_bias" for layer in (1, 2))]
    assert len(read_source(write(tmp_path, biased, scoring_func="sigmoid", **config)).blocks) == 2


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_wrong_index_is_one_line(index, tmp_path):
    (write(tmp_path, NAMES) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="allowed is a safetensors index"):
        read_source(tmp_path)
