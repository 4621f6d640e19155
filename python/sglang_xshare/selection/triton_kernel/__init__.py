"""Selection in one Triton kernel. `select` is a backend of `sglang_xshare.selection`; `supports` says what it serves."""

from .launch import select
from .recipe import supports

__all__ = ["select", "supports"]
