"""Tiny random models of the families the stage accepts: checkpoints for SGLang, and transformers' answers to them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from served.answers import NEW_TOKENS
from sglang_xshare import Router, Selection, SelectionPlan, select

EXPERTS, TOP_K = 32, 4
GROUPS = {"num_expert_group": 4, "topk_group": 2}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 512,
    "rope_parameters": ROTARY,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
"""What all have, by transformers' names."""


@dataclass(frozen=True)
class Family:
    """One architecture, as small as it can be."""

    config: str
    """Transformers' class of its configuration."""
    architecture: str
    """SGLang's class of the model."""
    shape: Mapping[str, Any]
    router: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its `Router` but top-k and bias, as its model computes, whatever its configuration says."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """What only a published config.json says, where transformers writes none of it and SGLang reads it."""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


INTERPRETED = {"TRITON_INTERPRET": "1"}
"""For what upstream computes by a Triton kernel even on a CPU, where that has no AMX."""
TRITON_ATTENTION = ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1")
"""Of SGLang's attention backends that run here, the only one for attention sinks and for latent attention."""

GROUPED = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
"""The experts of DeepSeek's models and of those that follow them."""
YARN = {
    **ROTARY,
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
}
LATENT = {
    **GROUPED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,  # with the next, a width that upstream's Triton attention knows
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

FAMILIES = {
    "GLM-4-MoE": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**GROUPED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
        {"scoring": "sigmoid", **GROUPS},
    ),
    "Mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": EXPERTS}),
    "OLMoE": Family(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_experts": EXPERTS, "num_key_value_heads": 4},
        {"renormalize": False},
    ),
    "Qwen2-MoE": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        {"renormalize": False},
        env=INTERPRETED,  # the shared expert's gate
    ),
    "Granite-MoE": Family(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": EXPERTS,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "MiniMax-M2": Family(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": EXPERTS, "head_dim": 32, "rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}},
        {"scoring": "sigmoid"},
        # Upstream's norm of queries and keys is a CUDA kernel, or one of the compiled sgl-kernel.
        {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 16, "use_qk_norm": False},
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            # Transformers leaves the attention of this model unscaled, whatever mscale_all_dim says.
            "rope_parameters": {**YARN, "mscale_all_dim": 0.0},
            "topk_method": "group_limited_greedy",
        },
        {"renormalize": False, **GROUPS},
        {"scoring_func": "softmax", "moe_layer_freq": 1},
        flags=TRITON_ATTENTION,
        env=INTERPRETED,
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": 32, "rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
        {"scoring": "sigmoid", **GROUPS},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        flags=TRITON_ATTENTION,
        env=INTERPRETED,
    ),
    "ERNIE 4.5": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": EXPERTS,
            "moe_k": TOP_K,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        # Its sliding window, 128, is longer than any text here.
        {"num_local_experts": EXPERTS, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        published={"swiglu_limit": 7.0},
        flags=TRITON_ATTENTION,
        env=INTERPRETED,
    ),
}


def make(family: Family, folder: Path) -> PreTrainedModel:
    """Write a random checkpoint in fp32, as one is published but for a tokenizer. Returns it as transformers' model."""
    config = getattr(transformers, family.config)(**{**SHAPE, **family.shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_weights(model)
    model.save_pretrained(folder)
    file = folder / "config.json"
    names = {**json.loads(file.read_text()), "rope_theta": ROTARY["rope_theta"], **family.published}
    file.write_text(json.dumps(names, indent=2))
    for module in model.modules():
        if hasattr(module, "q_norm") and names.get("use_qk_norm") is False:  # a switch transformers lacks
            module.q_norm = module.k_norm = nn.Identity()
        if hasattr(module, "num_group"):  # transformers' DeepSeek-V2 reads an attribute it never sets
            module.num_experts = EXPERTS
    return model


def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """So that every layer changes the answer and every expert is chosen by some token: outputs of unit variance, router
    logits spread as a trained router's, biases and norms that matter.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if "rotary" in name or name.endswith("embed_scale"):  # computed, of no checkpoint
            continue
        mean, spread = (1.0, 0.1) if re.search("norm|scale|scalar", name) else (0.0, 0.1)
        if tensor.dim() > 1 and "bias" not in name and "embed" not in name:
            spread = tensor.shape[-1] ** -0.5 * (2.0 if re.search(r"\.gate\.|\.router\.", name) else 1.0)
        elif "embed" in name or "sinks" in name:
            spread = 1.0
        elif "moe_statics" in name:  # a bias on softmax scores, of 1/32 in the mean
            spread = 0.02
        with torch.no_grad():
            tensor.normal_(mean, spread, generator=generator)


def read_routers(family: Family, model: PreTrainedModel) -> dict[int, Router]:
    """The router of every MoE layer, by the layer's number."""
    routers = {}
    for number, block, gate in _find_gates(model):
        bias = getattr(gate, "e_score_correction_bias", getattr(block, "e_score_correction_bias", None))
        statics: Any = getattr(gate, "moe_statics", None)
        if statics is not None:
            bias = statics.e_score_correction_bias.flatten()
        routers[number] = Router(TOP_K, correction_bias=bias, **family.router)
    return routers


@torch.inference_mode()
def answer(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Transformers' greedy answers to prompts of one length, as one batch."""
    ids, cache, answers = torch.tensor(prompts), None, []
    for _ in range(NEW_TOKENS):
        output = model(ids, past_key_values=cache, use_cache=True)
        ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        answers.append(ids)
    return torch.cat(answers, 1).tolist()


@contextmanager
def select_in_decode(family: Family, model: PreTrainedModel, plan: SelectionPlan, rows: int) -> Iterator[None]:
    """Within it, transformers' experts run what the reference selects, in forwards of so many tokens."""
    scaling = getattr(model.config, "routed_scaling_factor", 1.0)
    routers, hooks = read_routers(family, model), []
    for number, block, gate in _find_gates(model):
        choose = partial(_select, gate, plan, routers[number], rows)
        experts = getattr(block, "experts", None)
        if experts is None:
            hooks.append(gate.register_forward_hook(partial(_replace_groups, choose)))
        else:
            hooks.append(experts.register_forward_pre_hook(partial(_replace_choice, choose, scaling)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _select(gate: Any, plan: SelectionPlan, router: Router, rows: int, hidden: torch.Tensor) -> Selection | None:
    """The selection for hidden states [tokens, width]; None where these are not so many."""
    linear = getattr(gate, "layer", gate)
    logits = nn.functional.linear(hidden, linear.weight, getattr(linear, "bias", None))
    return select(logits, plan, router, backend="reference") if len(hidden) == rows else None


def _replace_choice(choose: Any, scaling: float, experts: nn.Module, args: Any) -> Any:
    """For experts called with (hidden states, ids, weights)."""
    out = choose(args[0])
    return args if out is None else (args[0], out.topk_ids.clamp_min(0).long(), out.topk_weights * scaling)


def _replace_groups(choose: Any, gate: nn.Module, args: Any, grouped: Any) -> Any:
    """For Granite's gate, which returns rows grouped by expert."""
    out = choose(args[0])
    if out is None:
        return grouped
    ids, weights = out.topk_ids.clamp_min(0).long().flatten(), out.topk_weights.flatten()
    order = ids.argsort()
    return order, order // TOP_K, weights[order], ids.bincount(minlength=EXPERTS).tolist(), grouped[-1]


def _find_gates(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module, nn.Module]]:
    """(layer number, MoE block, its gate)."""
    for number, layer in enumerate(model.model.layers):
        for block in layer.modules():
            gate = getattr(block, "gate", getattr(block, "router", None))
            if gate is not None:
                yield number, block, gate
