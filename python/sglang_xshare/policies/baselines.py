"""The policies that papers use as baselines."""

from dataclasses import replace

from .plan import KEYS, SelectionPlan
from .registry import Setting, register

VANILLA = SelectionPlan("vanilla", k0=None, coverage="own")


@register("vanilla", "upstream", selects=False)
def vanilla() -> SelectionPlan:
    """Route as the model does."""
    return VANILLA


@register(
    "pruned",
    "OEA, phase 1 (arXiv 2511.02237)",
    own_keys={"k0": replace(KEYS["k0"], low=1, help="experts every row keeps")},
    published=(Setting({"k0": 5}, "Qwen3-30B-A3B (top-8): no significant loss on 3 of 4 benchmarks"),),
)
def pruned(k0: int = 5, p: float = 1.0) -> SelectionPlan:
    """Keep only the k0 best experts of each row."""
    return SelectionPlan(k0=k0, p=p, coverage="own")


@register("dynamic-skip", "NAEE (arXiv 2402.14800), the baseline in XShare and OEA")
def dynamic_skip(beta: float) -> SelectionPlan:
    """Skip every expert of a row's top-k that scores below beta times the row's first."""
    return SelectionPlan(k0=None, beta=beta, coverage="own")
