"""Selection in one Triton kernel: `select` is the backend, and `supports` reports the plans and shapes it supports."""

from .launch import select
from .recipe import HANDLED, supports

__all__ = ["HANDLED", "select", "supports"]
