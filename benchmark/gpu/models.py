"""Checkpoints without weights: the configurations of real models, to be served with `--load-format dummy`.

Speed is that of the real shape. The weights are random, so quality means nothing; `dummy_server` gives their routers a
spread.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmark.common.paths import ROOT

MODELS = ROOT / "build" / "gpu" / "models"
TEXT_LINES = 1024
PAGED_SINCE = "0.5.23"
"""The first release of SGLang that pages experts; a machine that can install nothing has an older one."""
LAYERS = re.compile(r"-(\d+)-layers$")
COMMON: dict[str, Any] = {"dtype": "bfloat16", "transformers_version": "5.0.0", "tie_word_embeddings": False}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    }


def _qwen3_30b_a3b(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _qwen3_30b_a3b(layers=48),
    "qwen3-30b-a3b-12-layers": _qwen3_30b_a3b(layers=12),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    # Two of these can be loaded side by side on an H200, two of 36 layers cannot: `memory` counts.
    "gpt-oss-120b-30-layers": _gpt_oss(layers=30, experts=128),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    # An EAGLE-3 draft of gpt-oss-120b: one dense layer on three of the target's hidden states.
    "gpt-oss-120b-eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": 32000,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 17280,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "vocab_size": 201088,
    },
}


def name_cut(name: str, layers: int) -> str:
    """The name of a model's first layers, of an even number: `read_config` knows it."""
    return f"{LAYERS.sub('', name)}-{layers}-layers"


def read_config(name: str) -> dict[str, Any]:
    """The configuration of a model, or of its first layers where the name ends with how many."""
    cut = LAYERS.search(name)
    if name in CONFIGS or cut is None:
        return CONFIGS[name]
    config, layers = CONFIGS[LAYERS.sub("", name)], int(cut[1])
    types = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return config | types | {"num_hidden_layers": layers}


def write_model(name: str, folder: Path = MODELS) -> Path:
    """Write config.json and a tokenizer of the model's vocabulary: token i is the word "t<i>". Returns their folder.

    With a tokenizer, clients and server speak text, and upstream's benchmark sees the first token when it comes.
    """
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    config = COMMON | read_config(name)
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(place / "tokenizer.json"))
    _write_json(place / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_json(place / "config.json", config)
    return place


def write_texts(name: str, tokens: int, folder: Path = MODELS) -> Path:
    """Write lines of `tokens` random tokens each for `benchmark.common.prompts`. Returns their folder."""
    place = folder / name / "texts"
    place.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = [f"t{draw.randrange(read_config(name)['vocab_size'])}" for _ in range(TEXT_LINES * tokens)]
    lines = (" ".join(words[i : i + tokens]) + "\n" for i in range(0, len(words), tokens))
    (place / "random.txt").write_text("".join(lines))
    return place


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
