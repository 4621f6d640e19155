"""Patches of an installed SGLang release, applied and reverted: see docs/patching.md."""

from .engine import apply, check_patched, revert
from .tree import PatchError

__all__ = ["PatchError", "apply", "check_patched", "revert"]
