"""Selection in one Triton kernel. `supports` returns whether the kernel can compute a plan for a shape of logits."""

from .launch import select
from .recipe import HANDLED, supports

__all__ = ["HANDLED", "select", "supports"]
