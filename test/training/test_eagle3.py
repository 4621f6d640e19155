"""The unrolled draft against one that keeps every place's chain apart, as a server does; accepted lengths by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from small import small_qwen3
from training import train_eagle3
from training.acceptance import STEPS_AHEAD, accepted_lengths, continuations, draft_hits, target_hits
from training.eagle3 import Draft, features
from training.train_eagle3 import export_draft

HEADS, KV_HEADS, SIZE, HIDDEN, TOKENS = 4, 2, 8, 16, 12
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
    vocab_size=50,
    draft_vocab_size=20,
)
TARGET = small_qwen3(
    **{"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 4, "head_dim": SIZE},
    **{"num_experts": 4, "norm_topk_prob": False, "initializer_range": 0.3},
)


@pytest.fixture
def draft() -> Draft:
    torch.manual_seed(0)
    return Draft(CONFIG)


def chain(draft: Draft, aux: Tensor, embedded: Tensor, place: int, steps: int) -> list[Tensor]:
    """The logits of one place's draft: the prefix 0..place one position at a time, then the draft's own positions."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []

    def advance(position: int, embedding: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)])
        q = attention.q_proj(both).view(1, HEADS, 1, SIZE)
        k, v = (project(both).view(1, KV_HEADS, 1, SIZE) for project in (attention.k_proj, attention.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *draft.rotary(hidden, torch.tensor([[position]])))
        keys.append(k)
        values.append(v)
        mixed = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), enable_gqa=True)
        hidden = hidden + attention.o_proj(mixed.flatten())
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    for position in range(place + 1):
        hidden = advance(position, embedded[position + 1], draft.fc(aux[position]))
    logits.append(draft.lm_head(draft.norm(hidden)))
    for step in range(1, steps):
        hidden = advance(place + step, embedded[place + step + 1], hidden)
        logits.append(draft.lm_head(draft.norm(hidden)))
    return logits


@torch.inference_mode()
def test_unrolled_steps_equal_a_chain_of_their_own(draft: Draft) -> None:
    generator = torch.Generator().manual_seed(1)
    aux, embedded = torch.randn(2, TOKENS, 3 * HIDDEN, generator=generator), torch.randn(2, TOKENS, HIDDEN)
    unrolled = draft(aux, embedded, STEPS_AHEAD)
    assert [step.shape for step in unrolled] == [(2, TOKENS - step - 1, 20) for step in range(STEPS_AHEAD)]
    for row in range(2):
        for place in range(TOKENS - STEPS_AHEAD):
            wanted = chain(draft, aux[row], embedded[row], place, STEPS_AHEAD)
            for step, logits in enumerate(wanted):
                torch.testing.assert_close(unrolled[step][row, place], logits, rtol=1e-4, atol=1e-5)


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


def test_hits_are_where_greedy_text_is_repeated(draft: Draft) -> None:
    """On what a target writes greedily the target as its own draft is always right, and a draft of noise is not."""
    torch.manual_seed(0)
    target = Qwen3MoeForCausalLM(TARGET).eval()
    ids = continuations(target, torch.randint(50, (2, 6)), 20)
    assert all(step[:, 5:].all() for step in target_hits(target, ids))
    hits = draft_hits(target, draft, torch.arange(0, 40, 2), ids)
    assert [step.shape for step in hits] == [(2, 24), (2, 23), (2, 22)]
    assert not all(step[:, 5:].all() for step in hits)
    places = draft(features(target, ids)[1], target.model.embed_tokens(ids), 1)[0].argmax(-1)
    wanted = [[2 * int(places[row, place]) == int(ids[row, place + 2]) for place in range(24)] for row in range(2)]
    assert hits[0].tolist() == wanted


def test_export_is_what_the_server_reads(draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_eagle3, "DRAFT_VOCAB", 20)
    hot = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20].sort().values
    export_draft(draft, hot, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["d2t"] + torch.arange(20), hot)
    assert weights["t2d"].nonzero().flatten().tolist() == hot.tolist()
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (HEADS * SIZE, 2 * HIDDEN)
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 20
