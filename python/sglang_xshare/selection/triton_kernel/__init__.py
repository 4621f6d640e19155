"""Selection in one Triton kernel. `select` runs the kernel; `supports` returns whether it supports a plan and a shape.
"""

from .launch import select
from .recipe import HANDLED, supports

__all__ = ["HANDLED", "select", "supports"]
