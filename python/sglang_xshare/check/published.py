"""What a policy's authors measured, where it is this model that they measured."""

from __future__ import annotations

from typing import Any

from ..compatibility.moe_model import MoeModel
from ..policies import get_policy
from ..policies.schedule import Schedule

MODELS = {
    "gpt-oss-120b": ("GptOssForCausalLM", 36, 128),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", 48, 128),
    "Qwen3-235B-A22B": ("Qwen3MoeForCausalLM", 94, 128),
    "DeepSeek-R1": ("DeepseekV3ForCausalLM", 61, 256),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", 16, 64),
    "DBRX": ("DbrxForCausalLM", 40, 16),
    "Mixtral-8x7B": ("MixtralForCausalLM", 32, 8),
}
"""(architecture, layers, experts) of the models that `policies` has measurements of."""


def find_name(model: MoeModel) -> str | None:
    """The name of a model that has been measured; None of any other."""
    shape = model.architecture, model.num_layers, model.num_experts
    return next((name for name, known in MODELS.items() if known == shape), None)


def list_published(schedule: Schedule, model: MoeModel) -> list[dict[str, Any]]:
    """What was published of a schedule's own keys; `this_model` where it was measured on this model."""
    policy, name = get_policy(schedule.policy), find_name(model)
    keys = policy.resolve(schedule.keys)
    return [
        {"says": setting.result, "this_model": name is not None and name in setting.result}
        for setting in policy.published
        if policy.resolve(setting.keys) == keys
    ]
