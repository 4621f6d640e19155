"""A tiny Gemma 4 with experts, the assistant that drafts for it from its own keys and values, and what a CPU lacks."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import transformers
from transformers import Gemma4AssistantConfig, PreTrainedModel

from served.families import draw_weights, make
from served.family import EXPERTS, SHAPE, TOP_K, Family

HEAD = 32
GEMMA = Family(
    "Gemma4TextConfig",
    "Gemma4ForCausalLM",
    {
        **{"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": TOP_K, "moe_intermediate_size": 64},
        **{"head_dim": HEAD, "global_head_dim": HEAD, "hidden_size_per_layer_input": 0},
        # SGLang's attention with trees of drafts on a CPU has no sliding window.
        "layer_types": ["full_attention"] * SHAPE["num_hidden_layers"],
        "rope_parameters": None,
    },
    # What SGLang makes of a published configuration, that of a model with images.
    published={"swa_num_key_value_heads": 2, "swa_head_dim": HEAD, "swa_v_head_dim": HEAD, "v_head_dim": HEAD},
)
PLUGIN = "served.gemma:lend"
PLAIN = (
    *("--disable-hybrid-swa-memory", "--disable-overlap-schedule"),
    *("--decode-attention-backend", "intel_amx", "--prefill-attention-backend", "intel_amx"),
)
"""The flags of its server."""


def write_models(folder: Path) -> PreTrainedModel:
    """Write the model and its assistant, `target` and `draft` in the folder. Returns the former as transformers'."""
    model = make(GEMMA, folder / "target")
    text = model.config.to_dict() | {"hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    text |= {
        **{"tie_word_embeddings": True, "enable_moe_block": False, "vocab_size_per_layer_input": 0},
        "num_kv_shared_layers": 2,
    }
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=SHAPE["hidden_size"])
    draft = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    draw_weights(draft, seed=1)
    draft.save_pretrained(folder / "draft")
    file = folder / "draft" / "config.json"
    published = json.loads(file.read_text())
    published["text_config"] |= GEMMA.published
    file.write_text(json.dumps(published, indent=2))
    return model


def lend() -> None:
    """A SGLang plugin, called by upstream's `load_plugins()` in every process. It lends a later transformers' question,
    and a schedule without overlap, the one that a CPU has: there SGLang 0.5.23 hands every worker a pipeline's tensors,
    which this one does not take.
    """
    if not hasattr(transformers.PretrainedConfig, "is_heterogeneous"):
        transformers.PretrainedConfig.is_heterogeneous = False
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPWorkerV2

    generate = FrozenKVMTPWorkerV2.forward_batch_generation

    def generate_alone(self: Any, *args: Any, pp_proxy_tensors: None = None, **kwargs: Any) -> Any:
        return generate(self, *args, **kwargs)

    FrozenKVMTPWorkerV2.forward_batch_generation = generate_alone
