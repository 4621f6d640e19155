"""Families whose attention is of several kinds, or that SGLang serves by a wrapper: entries as in `families.py`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from served.families import FORMAT
from served.family import EXPERTS, INTERPRETED, LATENT, LATENT_SERVER, ROTARY, YARN, Family, named


@dataclass(frozen=True)
class Published(Family):
    """A model whose checkpoints are published otherwise than transformers writes them."""

    wrapper: Mapping[str, Any] = field(default_factory=dict)
    """Of one nested in several modalities: config.json beside `text_config`; its server is told of text alone."""


STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""Upstream keeps the inputs of a convolution in bf16, whatever the model's type."""
NO_SNAPSHOTS = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
"""A CPU has no other kind of prefix cache for states."""
WITH_STATES: dict[str, Any] = {"flags": NO_SNAPSHOTS, "env": {**INTERPRETED, **STATES}}
GATED_DELTA_NET = {
    **{"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "full_attention_interval": 2,  # layers: linear attention, full attention, linear attention
    "rope_parameters": {**ROTARY, "partial_rotary_factor": 0.25},
}
LINEAR = {"full_attention_interval": 2, "partial_rotary_factor": 0.25}
VISION = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}

HYBRIDS: dict[str, Family] = {
    "Qwen3.5-MoE": Published(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForConditionalGeneration",
        GATED_DELTA_NET,
        published=LINEAR,
        **WITH_STATES,
        names=((r"^model\.", "model.language_model."),),
        wrapper={"model_type": "qwen3_5_moe", "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2}},
    ),
    "Qwen3-Next": named("Qwen3Next", GATED_DELTA_NET, published=LINEAR, **WITH_STATES),
    "Nemotron 3": Published(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
            **{"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 64},
            **{"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5, "head_dim": 32},
            **{"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 32},
        },
        {"scoring": "sigmoid"},
        {"mamba_n_groups": 2, "mamba_chunk_size": 32},
        **WITH_STATES,
        names=((r"\.embedding\.", ".embeddings."),),
    ),
    "Kimi K2.5": Published(
        "DeepseekV3Config",
        "KimiK25ForConditionalGeneration",
        {
            **LATENT,
            **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "q_lora_rank": 32},
            "rope_parameters": {**YARN, "mscale_all_dim": 1.0},
        },
        {"scoring": "sigmoid"},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        **LATENT_SERVER,
        wrapper={
            "model_type": "kimi_k25",
            "vision_config": {
                **{prefix + name: size for name, size in VISION.items() for prefix in ("", "vt_")},
                "text_hidden_size": 128,
            },
        },
        names=(("^", "language_model."),),
    ),
    "GLM-5.2": named(
        "GlmMoeDsa",
        {
            **LATENT,
            **{"n_group": 1, "topk_group": 1, "num_local_experts": EXPERTS, "q_lora_rank": 32, "head_dim": 32},
            # Its own is plain. A CPU has but this one for latent attention, and the same with a factor of 1.
            "rope_parameters": {**YARN, "factor": 1.0, "mscale_all_dim": 1.0},
            **{"index_topk": 64, "index_head_dim": 64, "index_n_heads": 4},
            "indexer_types": ["full", "shared", "shared"],
        },
        {"scoring": "sigmoid"},
        # Upstream's indexer is of CUDA. It chooses all of a text shorter than index_topk, as those here: without it the
        # answers are the same.
        {
            **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "deepseek_v3", "index_topk": None},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        },
        **LATENT_SERVER,
    ),
}


def publish(family: Family, folder: Path) -> None:
    """Make of the checkpoint that `make` wrote one as its model is published."""
    if not isinstance(family, Published):
        return
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if family.wrapper:
        top = {name: config[name] for name in ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")}
        config = top | {"text_config": config, "language_model_only": True, **family.wrapper}
    file.write_text(json.dumps(config | {"architectures": [family.architecture]}, indent=2))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= dict(_cut(name, tensor))
    save_file(tensors, folder / "model.safetensors", FORMAT)


def _cut(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Where transformers keeps the experts of a layer in one tensor, or a gate with what it gates, the parts of it."""
    layer, found, kind = name.partition(".experts.")
    if found and tensor.dim() == 3:
        for number, expert in enumerate(tensor):
            parts = zip(("w1", "w3"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [("w2", expert)]
            for part, weight in parts:
                yield f"{layer}.experts.{number}.{part}.weight", weight.contiguous()
    elif name.endswith("gate_up_proj.weight"):
        for part, weight in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up_proj", part), weight.contiguous()
    else:
        yield name, tensor
