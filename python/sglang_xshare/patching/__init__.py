"""Patch an installed SGLang release, and take it back: see docs/patching.md."""

from sglang_xshare.patching.engine import Outcome, apply, revert
from sglang_xshare.patching.errors import PatchError
from sglang_xshare.patching.status import check_patched

__all__ = ["Outcome", "PatchError", "apply", "check_patched", "revert"]
