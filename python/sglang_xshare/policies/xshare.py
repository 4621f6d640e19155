"""XShare: Collaborative in-Batch Expert Sharing for Faster MoE Inference (Vankov et al.)."""

from dataclasses import replace
from typing import Any

from .plan import KEYS, SelectionPlan
from .registry import Setting, register

UNSET: Any = object()
"""A key that was not given, which is neither 0 nor null."""
MASS = 0.9
"""At equal experts a share of the utility has a smaller worst loss than a count, or a share of the experts, over models
of 64, 256 and 512 experts and 2 to 32 requests: 0.010 nats with this one (`benchmark.quality.defaults`)."""


@register(
    "xshare",
    "XShare, Algorithms 1-6",
    own_keys={"k0": replace(KEYS["k0"], help="warm-up: every row's best experts")},
    published=(
        Setting({"k0": 1, "add": 24}, "gpt-oss-120b, batch 16: +7 to 13 % tokens/s within 1 % accuracy"),
        Setting({"k0": 2, "add": 12}, "gpt-oss-120b, batch 16: +6 to 7 % tokens/s, accuracy not below the baseline"),
        Setting({"k0": 1, "add": 0, "add_per_request": 4}, "gpt-oss-120b, EAGLE-3, batch 4: +13 to 14 % tokens/s"),
        Setting({"k0": 1, "add": 0, "add_per_request": 5}, "gpt-oss-120b, EAGLE-3, batch 4: +8 to 10 % tokens/s"),
        Setting({"k0": 2, "add": 0, "add_per_request": 4}, "gpt-oss-120b, EAGLE-3, batch 4: +4 to 6 % tokens/s"),
        Setting({"k0": 1, "target_per_rank": 5}, "DeepSeek-R1, 8 ranks, batch 16: peak experts a rank 25.6 -> 8.6"),
        Setting({"k0": 1, "mass": MASS}, "this project's small models, 2 to 32 requests: 0.010 nats of loss at most"),
        Setting(
            {"k0": 1, "add": 12, "utility": "squared", "own_share": 0.75},
            "this project's small model, batch 16: 30 % less loss than without the last two",
        ),
    ),
    bare={"k0": 1, "mass": MASS},
    presets={"careful": {"k0": 1, "mass": 0.97}, "fast": {"k0": 1, "mass": 0.8}},
    depends={"mass": "none beside add, add_per_request or target_per_rank"},
)
def xshare(
    k0: int = 1,
    p: float = 1.0,
    utility: str = "topk",
    add: int = UNSET,
    add_per_request: int = 0,
    mass: float | None = UNSET,
    max_add: int | None = None,
    target_per_rank: int | None = None,
    balance: str = "literal",
    free_residents: bool | None = None,
    own_share: float = 0.0,
    acceptance: float = 1.0,
    warm_rows: int | None = None,
) -> SelectionPlan:
    """Every row's k0 best experts, then the best for the batch, each request or each rank; rows route within them.

    `mass` is 0.9 where no budget is given, not even `add` 0.
    """
    if mass is UNSET:
        mass = MASS if add is UNSET and not add_per_request and target_per_rank is None else None
    add = 0 if add is UNSET else add
    return SelectionPlan(**locals())  # keys alone: another variable here would be one
