"""What `sglang-xshare policies --show` says of a policy: the plan in force."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ..policies.description import describe
from .arguments import read_arguments


def show(words: Sequence[str], speculative: bool) -> dict[str, Any]:
    """The plan in force, every default resolved: `words` are the server's --expert-policy and, where there is one,
    --expert-policy-config. One word may hold both, with a space between. Raises ValueError in one line for what a
    server refuses of any model.
    """
    if len(words) == 1 and ":" not in words[0].partition(" ")[0]:
        words = words[0].split(maxsplit=1) or words
    if not 1 <= len(words) <= 2:
        found = " ".join(["--show", *words])
        raise ValueError(f"{found}: {len(words)} words; allowed is a policy, and its configuration")
    flags = SimpleNamespace(
        expert_policy=words[0],
        expert_policy_config=words[1] if len(words) > 1 else None,
        speculative_algorithm="EAGLE3" if speculative else None,
    )
    arguments = read_arguments(flags, speculates="--draft-tokens N")
    if arguments is None or arguments.schedule is None:
        return {"policy": "vanilla"}
    return describe(arguments.schedule)
