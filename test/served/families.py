"""Tiny random models of the families the stage accepts: checkpoints for SGLang, and transformers' answers to them."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from served.answers import NEW_TOKENS
from served.family import EXPERTS, ROTARY, SHAPE, TOP_K, Family
from sglang_xshare import Router, Selection, SelectionPlan, select

FORMAT = {"format": "pt"}
"""What transformers asks for of a file of weights."""
QK_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")


def make(family: Family, folder: Path) -> PreTrainedModel:
    """Write a random checkpoint in fp32, as one is published but for a tokenizer. Returns it as transformers' model."""
    # A configuration changes the dicts it is given.
    config = getattr(transformers, family.config)(**deepcopy({**SHAPE, **family.shape}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    drop_norms(family, model)
    draw_weights(model)
    model.save_pretrained(folder)
    if family.names:
        weights = folder / "model.safetensors"
        save_file({_rename(family, name): tensor for name, tensor in load_file(weights).items()}, weights, FORMAT)
    file = folder / "config.json"
    names = {**json.loads(file.read_text()), "rope_theta": ROTARY["rope_theta"], **family.published}
    file.write_text(json.dumps(names, indent=2))
    for module in model.modules():
        if hasattr(module, "num_group"):  # transformers' DeepSeek-V2 reads an attribute it never sets
            module.num_experts = EXPERTS
    return model


def _rename(family: Family, name: str) -> str:
    for old, new in family.names:
        name = re.sub(old, new, name)
    return name


def drop_norms(family: Family, model: PreTrainedModel) -> None:
    """Those of queries and keys where its published configuration says so, by a switch that transformers lacks."""
    if family.published.get("use_qk_norm") is False:
        for module, name in product(list(model.modules()), QK_NORMS):
            if hasattr(module, name):
                setattr(module, name, nn.Identity())


def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """So that every layer and expert matters: outputs of unit variance, logits spread, biases and norms that count."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if "rotary" in name or name.endswith("embed_scale"):  # computed, of no checkpoint
            continue
        mean, spread = (1.0, 0.1) if re.search("norm|scale|scalar", name) else (0.0, 0.1)
        if tensor.dim() > 1 and "bias" not in name and "embed" not in name:
            spread = tensor.shape[-1] ** -0.5 * (2.0 if re.search(r"\.gate\.|\.router\.", name) else 1.0)
        elif "embed" in name:  # tied, a large one would have every token repeat itself
            spread = 0.1 if model.config.tie_word_embeddings else 1.0
        elif "sinks" in name:
            spread = 1.0
        elif "moe_statics" in name:  # a bias on softmax scores, of 1/32 in the mean
            spread = 0.02
        with torch.no_grad():
            tensor.normal_(mean, spread, generator=generator)


def draw_prompts(vocabulary: int, count: int) -> list[list[int]]:
    """Random prompts of eight tokens."""
    return torch.randint(1, vocabulary, (count, 8), generator=torch.Generator().manual_seed(1)).tolist()


def read_routers(family: Family, model: PreTrainedModel) -> dict[int, Router]:
    """The router of every MoE layer, by the layer's number."""
    routers = {}
    names = ("e_score_correction_bias", "expert_bias")
    for number, block, gate in _find_gates(model):
        bias = next((getattr(part, name) for part in (gate, block) for name in names if hasattr(part, name)), None)
        statics: Any = getattr(gate, "moe_statics", None)
        if statics is not None:
            bias = statics.e_score_correction_bias.flatten()
        scale: Any = getattr(gate, "per_expert_scale", None)
        routers[number] = Router(TOP_K, correction_bias=bias, expert_scale=scale, **family.router)
    return routers


@torch.inference_mode()
def answer(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int = NEW_TOKENS) -> list[list[int]]:
    """Return transformers' greedy answers of `count` tokens to prompts of one length, as one batch."""
    ids, cache, answers = torch.tensor(prompts), None, []
    for _ in range(count):
        output = model(ids, past_key_values=cache, use_cache=True)
        ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        answers.append(ids)
    return torch.cat(answers, 1).tolist()


@contextmanager
def select_in_decode(family: Family, model: PreTrainedModel, plan: SelectionPlan, rows: int) -> Iterator[None]:
    """Within it, transformers' experts run what the reference selects, in forwards of so many tokens."""
    scaling = getattr(model.config, "routed_scaling_factor", getattr(model.config, "router_scaling_factor", 1.0))
    routers, hooks = read_routers(family, model), []
    for number, block, gate in _find_gates(model):
        linear = next((module for module in gate.modules() if isinstance(module, nn.Linear)), gate)
        choice = _Choice(linear, plan, routers[number], rows, scaling)
        hooks.append(linear.register_forward_pre_hook(choice.keep))
        experts = getattr(block, "experts", None)
        if experts is None:
            hooks.append(gate.register_forward_hook(choice.replace_groups))
        else:
            hooks.append(experts.register_forward_pre_hook(choice.replace))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Choice:
    """What the reference selects in one layer, for forwards of so many tokens."""

    linear: Any
    """The gate's layer: its gate, or within it."""
    plan: SelectionPlan
    router: Router
    rows: int
    scaling: float
    hidden: torch.Tensor | None = None
    """What that layer got in the forward that runs."""

    def keep(self, linear: nn.Module, args: Any) -> None:
        """For the gate's linear layer, called with (hidden states)."""
        self.hidden = args[0].flatten(0, -2)

    def select(self, hidden: torch.Tensor) -> Selection | None:
        """None for too few tokens. Transformers' DeepSeek-V2 never calls its gate: what it would tell the experts."""
        hidden, self.hidden = hidden if self.hidden is None else self.hidden, None
        logits = nn.functional.linear(hidden, self.linear.weight, getattr(self.linear, "bias", None))
        return select(logits, self.plan, self.router, backend="reference") if len(hidden) == self.rows else None

    def replace(self, experts: nn.Module, args: Any) -> Any:
        """For experts called with (hidden states, ids, weights)."""
        out = self.select(args[0])
        return args if out is None else (args[0], out.topk_ids.clamp_min(0).long(), out.topk_weights * self.scaling)

    def replace_groups(self, gate: nn.Module, args: Any, grouped: Any) -> Any:
        """For Granite's gate, which returns rows grouped by expert."""
        out = self.select(args[0])
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
