"""Export of checkpoint folders that SGLang and transformers can load."""

import json
import tempfile
from copy import deepcopy
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model, its configuration and its tokenizer into a folder. The dtype of the model is kept.

    Each file is written elsewhere and then moved, so the folder never contains an incomplete file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        write_config(model.config, Path(scratch))
        _write_tokenizer_config(tokenizer, Path(scratch))
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose output matrix is not tied to its embeddings.

    With a tied matrix, SGLang would compute logits of zero.
    """
    copy = deepcopy(model)
    copy.config.tie_word_embeddings = False
    copy.lm_head.weight = nn.Parameter(copy.model.embed_tokens.weight.detach().clone())
    return copy


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the parameters of a model to bfloat16 and return the model. Its buffers stay unchanged.

    The buffers contain the correction biases of the routers. Published checkpoints store these biases in float32,
    because differences below the precision of bfloat16 change the order of experts.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write `config.json` with the key names of published checkpoints. Only transformers 5 reads its new key names."""
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
