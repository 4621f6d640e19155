"""Functions that patch an installed SGLang release, or revert the patches (see docs/patching.md)."""

from .engine import apply, check_patched, revert
from .tree import PatchError

__all__ = ["PatchError", "apply", "check_patched", "revert"]
