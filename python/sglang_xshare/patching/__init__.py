"""Patch an installed SGLang release, and take it back: see docs/patching.md."""

from .engine import apply, revert
from .errors import PatchError
from .status import check_patched

__all__ = ["PatchError", "apply", "check_patched", "revert"]
