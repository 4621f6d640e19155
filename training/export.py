"""Checkpoint folders as a server and transformers load them."""

import json
import tempfile
from copy import deepcopy
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `model` in the dtype it has, its configuration and tokenizer into `folder`, each file in one move."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        write_config(model.config, Path(scratch))
        _write_tokenizer_config(tokenizer, Path(scratch))
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose output matrix is its own tensor: with a tied matrix SGLang serves zero logits."""
    copy = deepcopy(model)
    copy.config.tie_word_embeddings = False
    copy.lm_head.weight = nn.Parameter(copy.model.embed_tokens.weight.detach().clone())
    return copy


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the parameters of `model` to bfloat16 and return it. Buffers are unchanged.

    Published checkpoints keep the routers' correction biases in float32, because differences below bfloat16's precision
    change the order of experts.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write `config.json` with the names of published checkpoints; only transformers 5 reads its own names."""
    names = config.to_diff_dict()
    names.pop("_name_or_path", None)
    if "num_local_experts" in names:
        names["num_experts"] = names.pop("num_local_experts")
    names["rope_theta"] = names["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(names, indent=2, sort_keys=True) + "\n")


def _write_tokenizer_config(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    names = {
        "eos_token": tokenizer.eos_token,
        "model_max_length": tokenizer.model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
