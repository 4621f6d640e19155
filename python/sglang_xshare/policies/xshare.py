"""XShare: Collaborative in-Batch Expert Sharing for Faster MoE Inference (Vankov et al.)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .keys import Table
from .plan import KEYS, SelectionPlan
from .registry import Setting, register

DEFAULT = "default"
MASSES: dict[str, Table] = {
    "careful": {1: 0.93, 8: 0.95, 16: 0.97},
    DEFAULT: {1: 0.85, 8: 0.90, 16: 0.93},
    "fast": {1: 0.80, 8: 0.85, 16: 0.90},
}
"""The shares of utility that each word stands for. A share applies from its number of router rows on. At an equal
share, a larger batch would lose more quality. The missing utility would belong to fewer of its rows. The shares were
measured on six models of 32 to 512 experts with 2 to 32 requests (`benchmark.quality.defaults`):

* `careful` keeps 82 % of the experts, and its worst loss is 0.005 nats.
* `default` keeps 70 % of the experts, and its worst loss is 0.011 nats.
* `fast` keeps 62 % of the experts, and its worst loss is 0.021 nats.
"""


def complete(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with the default `mass` added, unless the keys contain `mass` or another budget.

    The key `add` counts as a budget even if its value is 0.
    """
    counts = "add" in keys or keys.get("add_per_request") or keys.get("target_per_rank") is not None
    return keys if counts or "mass" in keys else {**keys, "mass": DEFAULT}


@register(
    "xshare",
    "XShare, Algorithms 1-6",
    own_keys={
        "k0": replace(KEYS["k0"], help="warm-up: every row's best experts"),
        "mass": replace(KEYS["mass"], choices=tuple(MASSES)),
    },
    published=(
        Setting({"k0": 1, "add": 24}, "gpt-oss-120b, batch 16: +7 to 13 % tokens/s within 1 % accuracy"),
        Setting({"k0": 2, "add": 12}, "gpt-oss-120b, batch 16: +6 to 7 % tokens/s, accuracy not below the baseline"),
        Setting({"k0": 1, "add": 0, "add_per_request": 4}, "gpt-oss-120b, EAGLE-3, batch 4: +13 to 14 % tokens/s"),
        Setting({"k0": 1, "add": 0, "add_per_request": 5}, "gpt-oss-120b, EAGLE-3, batch 4: +8 to 10 % tokens/s"),
        Setting({"k0": 2, "add": 0, "add_per_request": 4}, "gpt-oss-120b, EAGLE-3, batch 4: +4 to 6 % tokens/s"),
        Setting({"k0": 1, "target_per_rank": 5}, "DeepSeek-R1, 8 ranks, batch 16: peak experts a rank 25.6 -> 8.6"),
        Setting(
            {"k0": 1, "mass": DEFAULT}, "this project's small models, 2 to 32 requests: 0.011 nats of loss at most"
        ),
        Setting(
            {"k0": 1, "add": 12, "utility": "squared", "own_share": 0.75},
            "this project's small model, batch 16: 30 % less loss than with k0 and add alone",
        ),
    ),
    bare={"k0": 1, "mass": DEFAULT},
    presets={word: {"k0": 1, "mass": word} for word in MASSES if word != DEFAULT},
    depends={"mass": "none beside add, add_per_request or target_per_rank"},
    complete=complete,
    tables={"mass": MASSES},
)
def xshare(
    k0: int = 1,
    p: float = 1.0,
    utility: str = "topk",
    add: int = 0,
    add_per_request: int = 0,
    mass: float | None = None,
    max_add: int | None = None,
    target_per_rank: int | None = None,
    balance: str = "literal",
    free_residents: bool | None = None,
    own_share: float = 0.0,
    acceptance: float = 1.0,
    warm_rows: int | None = None,
) -> SelectionPlan:
    """Every row's k0 best experts, then the best for the batch, each request or each rank; rows use only these experts.

    If no budget is given, `mass` is "default", a share that depends on the step's router rows. The key `add` counts as
    a budget even if its value is 0.
    """
    return SelectionPlan(**locals())  # locals() must contain parameters only, because each entry becomes a key
