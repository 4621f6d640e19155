"""SGLang-XShare: batch-aware expert selection for Mixture-of-Experts decoding in SGLang."""

from .plan import SelectionPlan, build_plan
from .selection import select
from .types import Batch, Router, Selection

__all__ = ["Batch", "Router", "Selection", "SelectionPlan", "build_plan", "select"]
