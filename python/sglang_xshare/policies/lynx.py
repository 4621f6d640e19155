"""Lynx: Enabling Efficient MoE Inference through Dynamic Batch-Aware Expert Selection (arXiv 2411.08982)."""

from dataclasses import replace

from .keys import as_json
from .plan import KEYS, SelectionPlan
from .registry import Setting, register


@register(
    "lynx-lat",
    "Lynx 4.2 (arXiv 2411.08982)",
    own_keys={
        "retain": replace(KEYS["budget"], help="most voted experts to keep, but at least the top-k"),
        "drop": replace(KEYS["drop"], help="least voted experts to drop, down to the top-k"),
    },
    published=(
        Setting({"retain": 12}, "DBRX (16 experts): GSM8k 71.6 -> 68.2"),
        Setting({"retain": 6}, "Mixtral-8x7B (8 experts): GSM8k 59.1 -> 55.7"),
    ),
)
def lynx_lat(retain: int | None = None, drop: int | None = None, own_share: float = 0.0) -> SelectionPlan:
    """Every row votes for its top-k; the least voted experts are dropped. Takes retain or drop."""
    if (retain is None) == (drop is None):
        raise ValueError(f"retain = {as_json(retain)}, drop = {as_json(drop)}: must have exactly one of the two set")
    return SelectionPlan(budget=retain, drop=drop, ranking="votes", own_share=own_share)


@register("lynx-acc", "Lynx 4.3 (arXiv 2411.08982)")
def lynx_acc(confidence: float, max_voters: int = 8, min_votes: int = 2, own_share: float = 0.0) -> SelectionPlan:
    """Only rows with a confident router vote; each voter's first choice is kept."""
    return SelectionPlan(confidence=confidence, max_voters=max_voters, min_votes=min_votes, own_share=own_share)
