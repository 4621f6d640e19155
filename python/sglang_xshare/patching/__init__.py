"""Patch an installed SGLang release, and take it back: see docs/patching.md."""

from .engine import apply, check_patched, revert
from .tree import PatchError

__all__ = ["PatchError", "apply", "check_patched", "revert"]
