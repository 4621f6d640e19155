"""The models that can be trained: their titles, configurations and training steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    """The recipe of a model: the title of its model card, its configuration and the number of training steps."""

    title: str
    configure: Callable[[], Qwen3MoeConfig | Glm4MoeConfig]
    steps: int = 800

    def new_model(self, seed: int = 0) -> PreTrainedModel:
        """Return an untrained model in float32. The same seed always gives the same model."""
        torch.manual_seed(seed)
        config = self.configure()
        kind: Any = Qwen3MoeForCausalLM if isinstance(config, Qwen3MoeConfig) else Glm4MoeForCausalLM
        model: PreTrainedModel = kind(config).float()
        model.set_experts_implementation("grouped_mm")  # the default in transformers is a slow loop over the experts
        return model


def qwen3(width: int, experts: int, top_k: int) -> Qwen3MoeConfig:
    """Return the configuration of a Qwen3-MoE. `width` is the intermediate size of an expert."""
    return Qwen3MoeConfig(moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k, **COMMON)


def grouped() -> Glm4MoeConfig:
    """Return a configuration with DeepSeek-V3's routing and the size of the shipped model.

    The router has sigmoid scores, correction biases and four expert groups, of which it uses the best two. The weights
    are scaled by 2.5, and there is a shared expert. The attention is GLM-4.5's grouped-query attention.
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


def biased() -> Glm4MoeConfig:
    """Return a configuration with a routing like that of Kimi K2 and MiniMax-M2.

    The router selects 8 of 256 experts, with sigmoid scores and correction biases but without groups. There is also a
    shared expert.
    """
    config = grouped()
    config.update({"n_routed_experts": 256, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1})
    return config


MODELS = {
    "qwen3": Recipe("A Qwen3-MoE small enough to keep beside the code", partial(qwen3, 32, 64, 8), steps=1600),
    "grouped": Recipe("A GLM-4-MoE with sigmoid scores, correction biases and groups of experts", grouped),
    "wide": Recipe("A Qwen3-MoE whose experts are as wide as its hidden state", partial(qwen3, 128, 32, 4)),
    "biased": Recipe("A GLM-4-MoE of 256 experts with sigmoid scores and correction biases", biased, steps=400),
    # The same number of experts and top-k as in Qwen3-30B-A3B.
    "many128": Recipe("A Qwen3-MoE of 128 experts", partial(qwen3, 16, 128, 8), steps=400),
    # The same number of experts and top-k as in Qwen3-Next.
    "many512": Recipe("A Qwen3-MoE of 512 experts", partial(qwen3, 16, 512, 10), steps=400),
}
"""The recipes by their names on the command line. The first recipe is for the shipped checkpoint."""
SHIPPED = next(iter(MODELS))


def find_folder(name: str) -> Path:
    """Return the checkpoint folder of a model."""
    return ROOT / "checkpoints/qwen3-moe-tiny" if name == SHIPPED else BUILD / "models" / name
