"""Drafts beyond a dense chain: a Mixture-of-Experts draft never selects, an adaptive width is followed."""

import json
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmark.common.speculative import speculative_flags
from served.answers import LAYERS, ask
from served.eagle import DRAFT_TOKENS, eagle, select_again
from served.release import LATEST

XSHARE = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}
FLAGS = ("--expert-policy", "xshare:k0=1,add_per_request=4")


def make_draft(folder: Path) -> None:
    """A random Mixtral with the target's vocabulary: upstream takes a Qwen3-MoE draft for a layer of the target's."""
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=8,
        vocab_size=1024,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)


@pytest.mark.long
def test_experts_of_a_draft_are_left_alone(tiny_model, patched_release, tmp_path):
    """Its weights are random, so that hardly a token of it is accepted; what matters is how it routes."""
    make_draft(tmp_path / "draft")
    flags = (*speculative_flags(tmp_path / "draft", algorithm="STANDALONE"), *FLAGS)
    answers = ask(tiny_model, patched_release(LATEST), flags, tmp_path)
    drafted = [call for call in answers.records if call["mode"].endswith("_DRAFT")]
    assert {call["layer"] for call in drafted} == {0, 1}
    assert max(call["rows"] for call in drafted) >= 16
    assert all(call["after"] == call["before"] for call in drafted)
    verified = answers.calls("TARGET_VERIFY")
    assert all(call["active"] == select_again(call, XSHARE, DRAFT_TOKENS) for call in verified)
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in verified)
    assert answers.metrics["steps policy"] == len(verified) / LAYERS > 0


@pytest.mark.long
def test_adaptive_width_is_followed(tiny_model, patched_release, tmp_path):
    """Hysteresis chosen so that the server goes to and fro between one draft token and three."""
    config = tmp_path / "adaptive.json"
    steps = {"candidate_steps": [1, 3], "down_hysteresis": 2.0, "warmup_batches": 1, "update_interval": 1}
    config.write_text(json.dumps({"1": steps}))
    own = ("--expert-policy-draft-depth", "upstream")
    adaptive = ("--speculative-adaptive", "--speculative-adaptive-config", str(config), *own)
    flags = (*eagle(tiny_model), *FLAGS, *adaptive)
    answers = ask(tiny_model, patched_release(LATEST), flags, tmp_path)
    calls = answers.calls("TARGET_VERIFY")
    assert {call["rows"] / call["requests"] for call in calls} == {2, 4}
    for call in calls:
        assert call["active"] == select_again(call, XSHARE, call["rows"] // call["requests"])
    assert answers.metrics["steps policy"] == len(calls) / LAYERS
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in calls)
