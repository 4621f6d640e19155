"""A random adapter of a checkpoint's attention."""

import json

import torch
from safetensors.torch import save_file

SHARED = {"k_proj", "v_proj"}
"""Projections to as many heads as keys and values have; the other ones are to as many as queries have."""


def write_adapter(model, folder, targets, rank=8):
    """Write one as PEFT does, large enough to change answers, for these projections. Returns its folder."""
    config = json.loads((model / "config.json").read_text())
    heads = {name: config[f"num_{'key_value' if name in SHARED else 'attention'}_heads"] for name in targets}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            prefix, width = f"base_model.model.model.layers.{layer}.self_attn.{name}", config["hidden_size"]
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * width**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(count * config["head_dim"], rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written | {"task_type": "CAUSAL_LM"}))
    return folder
