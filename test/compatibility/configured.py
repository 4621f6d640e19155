"""A model's configuration as SGLang has read it, and a server's arguments as SGLang has resolved them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

HIDDEN = {"speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True}
"""Arguments with which SGLang returns the hidden states that EAGLE3 would take, and does not speculate."""


def model(architecture: str, **text_config: object) -> SimpleNamespace:
    names, text = SimpleNamespace(architectures=[architecture]), SimpleNamespace(**text_config)
    return SimpleNamespace(hf_config=names, hf_text_config=text, num_hidden_layers=4)


def pack(**weights: object) -> dict[str, object]:
    """Return the quantization that a compressed-tensors checkpoint declares for its weights."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def server(**changes: object) -> SimpleNamespace:
    """The arguments of a server of one rank that a policy is served on, with these changes."""
    served: dict[str, object] = {
        **{"expert_policy": "xshare", "disaggregation_mode": "null", "moe_runner_backend": "auto"},
        **{"moe_a2a_backend": "none", "tp_size": 1, "dp_size": 1, "ep_size": 1, "init_expert_location": "trivial"},
        **{"enable_eplb": False, "ep_num_redundant_experts": 0, "enable_return_routed_experts": False},
        **{"speculative_algorithm": None, "speculative_draft_model_path": None, "speculative_num_draft_tokens": None},
        **{"max_running_requests": None, "speculative_adaptive": False, "device": "cpu", "model_path": "path"},
    }
    return SimpleNamespace(**served | changes)


def write_configs(folder: Path, configs: Mapping[str, object]) -> Path:
    """Write models of these configurations without weights, each into a folder of its name."""
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder
