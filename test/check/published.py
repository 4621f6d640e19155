"""Published shapes of the families in docs/limits.md, and the number of weights that each was published with."""

import json
from typing import Any

import transformers

from check.shapes import SHAPES

DEFAULTS = {
    **{"DeepSeek-V4": "DeepseekV4ForCausalLM", "ERNIE 4.5": "Ernie4_5_MoeForCausalLM"},
    **{"GLM-4.7-Flash": "Glm4MoeLiteForCausalLM", "GLM-5.2": "GlmMoeDsaForCausalLM", "HunYuan v3": "HYV3ForCausalLM"},
    **{"Laguna": "LagunaForCausalLM", "Llama 4": "Llama4ForConditionalGeneration", "Mellum": "MellumForCausalLM"},
    "Mixtral": "MixtralForCausalLM",
    **{"MiniMax-M2": "MiniMaxM2ForCausalLM", "Qwen2-MoE": "Qwen2MoeForCausalLM", "Qwen3-Next": "Qwen3NextForCausalLM"},
    "Qwen3.5-MoE": "Qwen3_5MoeForConditionalGeneration",
}
"""Families whose published shape is what transformers' configuration class has by default."""
BILLIONS = {
    **{"Cohere 2 MoE": "30", "DeepSeek-V2": "15.7", "DeepSeek-V3": "671.0", "DeepSeek-V4": "284", "ERNIE 4.5": "21.8"},
    **{"EXAONE-MoE": "236", "GLM-4-MoE": "355", "GLM-4.7-Flash": "30", "GLM-5.2": "744", "Gemma 4": "25.2"},
    **{"Granite 4": "32.2", "Granite-MoE": "3.3", "HunYuan v1": "80", "HunYuan v3": "295", "Kimi K2.5": "1030"},
    **{"Laguna": "33", "Llama 4": "109", "Mellum": "12", "MiniMax-M2": "229", "MiniMax-M3": "428", "Mixtral": "46.7"},
    **{"Nemotron 3": "31.6", "OLMoE": "6.92", "Qwen2-MoE": "14.3", "Qwen3-MoE": "30.5", "Qwen3-Next": "79.7"},
    **{"Qwen3.5-MoE": "35", "gpt-oss": "116.8"},
}
"""Weights that each model was published with, in billions, with the digits that its model card or report has."""
UNKNOWN = ("Granite-MoE shared", "Kimi K3", "Qwen3.8-Flash-Next", "Step-3.5")
"""Families without a row. transformers 5.12 has modules of the first alone, whose published shape was not at hand; the
weights of the others are counted from safetensors.
"""


def read_shape(name: str) -> dict[str, Any]:
    """Return the config.json of a family's published model."""
    if name in SHAPES:
        return SHAPES[name]
    config = getattr(transformers, DEFAULTS[name]).config_class().to_dict()
    return json.loads(json.dumps(config, default=str)) | {"architectures": [DEFAULTS[name]]}
