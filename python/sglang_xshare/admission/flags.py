"""What is checked of a server's flags, in order, before SGLang resolves them: its own errors are tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..refusal import check_tree
from .model import check_path
from .modes import check_modes


def list_checks(server_args: Any) -> list[Callable[[], None]]:
    """The checks of a server whose stage is on; each raises `ExpertPolicyError` or returns."""
    path = getattr(server_args, "model_path", None)
    flag = "--expert-policy" if getattr(server_args, "expert_policy", None) else "--mask-padding-experts"
    return [partial(check_path, path), partial(check_tree, flag), partial(check_modes, server_args)]
