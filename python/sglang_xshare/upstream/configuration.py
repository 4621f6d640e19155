"""The keys of config.json for the number of experts and the top-k. Model families use different names."""

from typing import Any

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def find_name(text_config: Any, names: tuple[str, ...]) -> str:
    """Return the first of `names` in the configuration, or `names[0]` if it contains none.

    The configuration includes `ffn_config`, which DBRX uses.
    """
    parts = [text_config, getattr(text_config, "ffn_config", None)]
    return next((name for part in parts for name in names if getattr(part, name, None)), names[0])


def find_value(text_config: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the key that `find_name` returns, or 0 if the key is missing.

    If the value is a list of equal entries (HunYuan), return one entry.
    """
    name = find_name(text_config, names)
    found = getattr(text_config, name, None) or getattr(getattr(text_config, "ffn_config", None), name, None) or 0
    return found[0] if isinstance(found, list) and len(set(found)) == 1 else found
