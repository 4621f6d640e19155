"""What `sglang-xshare policies --show` says of a policy: the plan in force, and what a server would warn of."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ..policies.description import describe
from .arguments import read_arguments


def show(
    words: Sequence[str],
    model: str | None = None,
    draft_tokens: int | None = None,
    ranks: int = 1,
    batch: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """(the plan in force, warnings) of a policy: `words` are the server's --expert-policy and, where there is one,
    --expert-policy-config. One word may hold both, with a space between.

    `draft_tokens` are those that a server verifies a request, None where it does not speculate. With `model`, a folder,
    the plan is checked against its config.json on `ranks` expert-parallel ranks, and warned of where it drops no expert
    of it, or none of at most `batch` requests. Raises ValueError in one line for what a server refuses.
    """
    if len(words) == 1 and ":" not in words[0].partition(" ")[0]:
        words = words[0].split(maxsplit=1) or words
    if not 1 <= len(words) <= 2:
        raise ValueError(f"--show {' '.join(words)}: {len(words)} words; allowed is a policy, and its configuration")
    flags = SimpleNamespace(
        expert_policy=words[0],
        expert_policy_config=words[1] if len(words) > 1 else None,
        speculative_algorithm=draft_tokens and "EAGLE3",
    )
    arguments = read_arguments(flags, speculates="--draft-tokens N")
    schedule = arguments and arguments.schedule
    if not schedule:
        return {"policy": "vanilla"}, []
    if model is None:
        return describe(schedule), []
    from .idle_budgets import list_idle_budgets  # these load torch
    from .model import build_plans, read_folder

    shape = read_folder(model)
    largest = None if batch is None else (batch, "--batch")
    warnings = []
    for part in schedule.parts:
        rows = batch and batch * (draft_tokens or 1)
        if rows and rows < part.min_tokens:
            warnings.append(
                f"--expert-policy {part.policy}: min_tokens = {part.min_tokens}: the largest batch has {rows} rows "
                f"(--batch {batch}), so that it never selects"
            )
        plans = build_plans(part, shape, ranks)
        warnings += list_idle_budgets(part, plans, shape, ranks, largest, draft_tokens or 1)
    named = {name: getattr(shape, name) for name in ("architecture", "num_layers", "num_experts", "top_k")}
    return describe(schedule, shape.top_k) | {"model": named}, warnings
