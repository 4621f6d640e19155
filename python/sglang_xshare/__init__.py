"""SGLang-XShare: batch-aware expert selection for Mixture-of-Experts decoding in SGLang."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .policies import build_plan
    from .policies.plan import SelectionPlan
    from .selection import select
    from .types import Batch, Router, RunnerSlots, Selection

__all__ = ["Batch", "Router", "RunnerSlots", "Selection", "SelectionPlan", "__version__", "build_plan", "select"]

_MODULES = dict.fromkeys(("Batch", "Router", "RunnerSlots", "Selection"), "types")
_MODULES |= {"SelectionPlan": "policies.plan", "build_plan": "policies", "select": "selection"}


def __getattr__(name: str) -> Any:
    # Each name is imported when it is first used, because the command that patches SGLang runs without torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
