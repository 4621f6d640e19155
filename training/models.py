"""The models that are trained here: configuration, loss that balances the experts, and folder of each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.balance import loss_with_moved_biases, loss_with_penalty

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
VOCAB, LONGEST = 1024, 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the size that GPU attention kernels require
    "norm_topk_prob": True,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Recipe:
    """One model: its title in the card, class, configuration, loss, folders and training steps.

    `loss` of model and ids [rows, tokens] is the cross-entropy with a balance of the experts.
    """

    title: str
    build: Callable[[Any], PreTrainedModel]
    configure: Callable[[], Any]
    loss: Callable[[PreTrainedModel, Tensor], Tensor]
    out: Path
    state: Path
    steps: int = 800

    def new_model(self, seed: int = 0) -> PreTrainedModel:
        """Return an untrained model in float32, always the same for a seed."""
        torch.manual_seed(seed)
        model = self.build(self.configure()).float()
        model.set_experts_implementation("grouped_mm")  # transformers' default loops over the experts
        return model


def qwen3() -> Qwen3MoeConfig:
    """Return a model of 64 experts of which 8 run, a quarter as wide as the hidden state; 3.7 million parameters."""
    return Qwen3MoeConfig(moe_intermediate_size=32, num_experts=64, num_experts_per_tok=8, **COMMON)


def wide() -> Qwen3MoeConfig:
    """Return a model of 32 experts of which 4 run, as wide as the hidden state; 6.8 million parameters."""
    return Qwen3MoeConfig(moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4, **COMMON)


def grouped() -> Glm4MoeConfig:
    """Return DeepSeek-V3's routing at the size of `qwen3`, with GLM-4.5's grouped-query attention.

    Sigmoid scores with a correction bias, the two best of four groups, a shared expert, weights scaled by 2.5.
    """
    return Glm4MoeConfig(
        moe_intermediate_size=32,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=0,
        use_qk_norm=True,
        **COMMON,
    )


def many512() -> Qwen3MoeConfig:
    """Return a model of 512 experts of which 10 run, as in Qwen3-Next, an eighth as wide as the hidden state."""
    return Qwen3MoeConfig(moe_intermediate_size=16, num_experts=512, num_experts_per_tok=10, **COMMON)


def many128() -> Qwen3MoeConfig:
    """Return a model of 128 experts of which 8 run, as in Qwen3-30B-A3B, an eighth as wide as the hidden state."""
    return Qwen3MoeConfig(moe_intermediate_size=16, num_experts=128, num_experts_per_tok=8, **COMMON)


def biased() -> Glm4MoeConfig:
    """Return the routing of Kimi K2 and MiniMax-M2: 8 of 256 experts beside a shared expert.

    Sigmoid scores with a correction bias, without groups.
    """
    config = grouped()
    config.update({"n_routed_experts": 256, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1})
    return config


MODELS = {
    "qwen3": Recipe(
        "A Qwen3-MoE small enough to keep beside the code",
        Qwen3MoeForCausalLM,
        qwen3,
        loss_with_penalty,
        ROOT / "checkpoints/qwen3-moe-tiny",
        BUILD / "train_moe/state.pt",
        steps=1600,
    ),
    "grouped": Recipe(
        "A GLM-4-MoE with sigmoid scores, correction biases and groups of experts",
        Glm4MoeForCausalLM,
        grouped,
        loss_with_moved_biases,
        BUILD / "models/grouped",
        BUILD / "train_moe/grouped.pt",
    ),
    "wide": Recipe(
        "A Qwen3-MoE whose experts are as wide as its hidden state",
        Qwen3MoeForCausalLM,
        wide,
        loss_with_penalty,
        BUILD / "models/wide",
        BUILD / "train_moe/wide.pt",
    ),
    "biased": Recipe(
        "A GLM-4-MoE of 256 experts with sigmoid scores and correction biases",
        Glm4MoeForCausalLM,
        biased,
        loss_with_moved_biases,
        BUILD / "models/biased",
        BUILD / "train_moe/biased.pt",
        steps=400,
    ),
    "many128": Recipe(
        "A Qwen3-MoE of 128 experts",
        Qwen3MoeForCausalLM,
        many128,
        loss_with_penalty,
        BUILD / "models/many128",
        BUILD / "train_moe/many128.pt",
        steps=400,
    ),
    "many512": Recipe(
        "A Qwen3-MoE of 512 experts",
        Qwen3MoeForCausalLM,
        many512,
        loss_with_penalty,
        BUILD / "models/many512",
        BUILD / "train_moe/many512.pt",
        steps=400,
    ),
}
"""Recipes by the name on the command line; the first is that of the shipped checkpoint."""
