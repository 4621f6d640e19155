"""By which names a model's configuration tells of its experts."""

from __future__ import annotations

from typing import Any

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def find_name(text_config: Any, names: tuple[str, ...]) -> str:
    """By which of these the configuration, or its part for the experts (DBRX), tells; the first without any."""
    parts = [text_config, getattr(text_config, "ffn_config", None)]
    return next((name for part in parts for name in names if getattr(part, name, None)), names[0])


def find_value(text_config: Any, names: tuple[str, ...]) -> Any:
    """What the configuration has by the name that `find_name` finds; 0 without any. A number that is listed by layer
    (HunYuan), the same for each, is that number.
    """
    name = find_name(text_config, names)
    found = getattr(text_config, name, None) or getattr(getattr(text_config, "ffn_config", None), name, None) or 0
    return found[0] if isinstance(found, list) and len(set(found)) == 1 else found
