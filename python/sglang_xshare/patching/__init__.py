"""Patch an installed SGLang release, and take it back: see docs/patching.md."""

from .engine import Outcome, apply, revert
from .errors import PatchError
from .status import check_patched

__all__ = ["Outcome", "PatchError", "apply", "check_patched", "revert"]
