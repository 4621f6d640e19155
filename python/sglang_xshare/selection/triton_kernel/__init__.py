"""Selection in one Triton kernel: `select` is the backend, `supports` says which plans and shapes it serves."""

from .launch import select
from .recipe import HANDLED, supports

__all__ = ["HANDLED", "select", "supports"]
