"""Keys of config.json that hold the number of experts and the top-k, whose names differ between model families."""

from typing import Any

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def find_name(text_config: Any, names: tuple[str, ...]) -> str:
    """Return the first of these keys in the configuration or its `ffn_config` (DBRX); `names[0]` if it has none."""
    parts = [text_config, getattr(text_config, "ffn_config", None)]
    return next((name for part in parts for name in names if getattr(part, name, None)), names[0])


def find_value(text_config: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the key that `find_name` finds, else 0; the entry of a list of equal entries (HunYuan)."""
    name = find_name(text_config, names)
    found = getattr(text_config, name, None) or getattr(getattr(text_config, "ffn_config", None), name, None) or 0
    return found[0] if isinstance(found, list) and len(set(found)) == 1 else found
