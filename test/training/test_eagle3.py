"""Accepted lengths by hand, hits by the draft's own answers, its export; `test_checkpoints` runs the shipped draft."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3MoeForCausalLM

from small import small_qwen3
from training import train_eagle3
from training.acceptance import accepted_lengths, continuations, draft_hits, target_hits
from training.eagle3 import Draft, features
from training.train_eagle3 import export_draft

HIDDEN = 16
CONFIG = LlamaConfig(
    **{"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "draft_vocab_size": 20},
)
TARGET = small_qwen3(
    **{"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_experts": 4, "norm_topk_prob": False, "initializer_range": 0.3},
)


@pytest.mark.parametrize(
    ("misses", "lengths"),
    [
        ([], [4, 4]),  # places 3 and 7; the text ends within the next draft
        ([(0, 3)], [1, 4, 4]),  # nothing accepted, then places 4, 8
        ([(1, 3), (2, 5)], [2, 3, 4]),  # places 3, 5, 8
        ([(2, 4)], [4, 4]),  # a miss at a place the walk never comes to
    ],
)
def test_accepted_lengths(misses: list[tuple[int, int]], lengths: list[int]) -> None:
    hits = [torch.ones(1, 15 - step - 2, dtype=torch.bool) for step in range(3)]
    for step, place in misses:
        hits[step][0, place] = False
    assert accepted_lengths(hits, prompt=4) == lengths
    assert accepted_lengths([step.repeat(2, 1) for step in hits], prompt=4) == lengths * 2


def test_hits_are_where_greedy_text_is_repeated() -> None:
    """On what a target writes greedily the target as its own draft is always right, and a draft of noise is not."""
    torch.manual_seed(0)
    draft, target = Draft(CONFIG), Qwen3MoeForCausalLM(TARGET).eval()
    ids = continuations(target, torch.randint(50, (2, 6)), 20)
    assert all(step[:, 5:].all() for step in target_hits(target, ids))
    hits = draft_hits(target, draft, torch.arange(0, 40, 2), ids)
    assert [step.shape for step in hits] == [(2, 24), (2, 23), (2, 22)]
    assert not all(step[:, 5:].all() for step in hits)
    places = draft(features(target, ids)[1], target.model.embed_tokens(ids), 1)[0].argmax(-1)
    wanted = [[2 * int(places[row, place]) == int(ids[row, place + 2]) for place in range(24)] for row in range(2)]
    assert hits[0].tolist() == wanted


def test_export_is_what_the_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_eagle3, "DRAFT_VOCAB", 20)
    hot = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20].sort().values
    export_draft(Draft(CONFIG), hot, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["d2t"] + torch.arange(20), hot)
    assert weights["t2d"].nonzero().flatten().tolist() == hot.tolist()
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (4 * 8, 2 * HIDDEN)
    assert LlamaConfig.from_pretrained(tmp_path).draft_vocab_size == 20
