"""Pruned checkpoints of other families, in transformers: the same logits as the static ranking of the whole one."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from served.families import EXPERTS, FAMILIES, make, select_in_decode
from sglang_xshare import build_plan
from sglang_xshare.cli import main

KEEP, TOKENS = 12, 24
UNGROUPED = {"n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("name", ["Mixtral", "MiniMax-M2", "GLM-4-MoE", "DeepSeek-V3"])
def test_logits_are_those_of_the_static_ranking(name, tmp_path):
    family = FAMILIES[name]
    if "n_group" in family.shape:
        router = {"scoring": "sigmoid"}
        family = replace(family, shape={**family.shape, **UNGROUPED}, router=router)
    whole = make(family, tmp_path / "whole")
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(3)).tolist()
    (tmp_path / "order").write_text(json.dumps(order))
    words = ["--model", tmp_path / "whole", "--order", tmp_path / "order", "--keep", KEEP, "--out", tmp_path / "out"]
    assert main(["prune", *map(str, words)]) == 0
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for module in pruned.modules():
        if hasattr(module, "q_norm") and family.published.get("use_qk_norm") is False:  # as `make` has it
            module.q_norm = module.k_norm = torch.nn.Identity()
    plan = build_plan("moe-spec", budget=KEEP, ranking="static", order=tuple(order))
    ids = torch.randint(0, 1024, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        vanilla = whole(ids).logits
        with select_in_decode(family, whole, plan, TOKENS):
            wanted = whole(ids).logits
        found = pruned(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert (vanilla - wanted).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("OLMoE", "norm_topk_prob = false: a softmax over fewer experts gives each more weight"),
        ("DeepSeek-V3", "topk_group = 2 of n_group = 4: a group's rank depends on its lost experts"),
        ("ERNIE 4.5", "a correction bias: a softmax over fewer experts raises scores beside the bias"),
        ("Granite-MoE", "no tensor of a single expert, as where all are packed in one"),
        ("gpt-oss", "no tensor of a single expert, as where all are packed in one"),
    ],
)
def test_what_would_not_answer_alike_is_one_line(name, line, tmp_path, capsys):
    make(FAMILIES[name], tmp_path / "whole")
    capsys.readouterr()
    (tmp_path / "order").write_text(json.dumps(list(range(EXPERTS))))
    words = ["--model", tmp_path / "whole", "--order", tmp_path / "order", "--keep", KEEP, "--out", tmp_path / "out"]
    assert main(["prune", *map(str, words)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"prune: --model {tmp_path / 'whole'}: ")
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
