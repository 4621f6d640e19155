"""Budgets without an effect: warned of with the number, and only where the plain reference agrees."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.compatibility.idle_budgets import largest_batch, list_idle_budgets
from sglang_xshare.compatibility.model import build_plans
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.policies.schedule import build_schedule

EXPERTS, TOP_K, LAYERS = 64, 8, 4
MODEL = MoeModel("path", "Qwen3MoeForCausalLM", LAYERS, EXPERTS, TOP_K, "softmax", True)


def warn(policy: str, batch: int | None, ranks: int = 1, tokens: int = 1, **config: Any) -> list[str]:
    """What is warned of at most `batch` requests of `tokens` rows."""
    schedule = build_schedule(policy, config, speculative=tokens > 1)
    assert schedule is not None
    limit = None if batch is None else (batch, "--max-running-requests")
    plans = build_plans(schedule, MODEL, ranks)
    lines = list_idle_budgets(schedule, plans, MODEL, ranks=ranks, batch=limit, tokens=tokens)
    assert not any("\n" in line for line in lines)
    return lines


def test_a_budget_too_large_for_the_largest_batch_is_named_with_what_would_do():
    (line,) = warn("xshare", 3, k0=1, add=24)
    assert line.startswith("add = 24: 21 ")
    assert "(--max-running-requests 3)" in line
    assert warn("xshare", 4, k0=1, add=24) == []
    assert warn("xshare", None, k0=1, add=24) == []


@pytest.mark.parametrize("policy", ["pruned", "oea"])
def test_a_policy_without_a_budget_is_never_warned_of(policy):
    assert warn(policy, 2) == []
    assert warn("dynamic-skip", 2, beta=0.5) == []


def test_mass_beside_add():
    (line,) = warn("xshare", 64, k0=1, add=24, mass=0.9)
    assert line.startswith("mass = 0.9 beside add = 24: ")
    assert warn("xshare", 64, k0=1, mass=0.9) == []


def test_residents_are_asked_for_where_no_server_tells_them():
    lines = warn("xshare", 64, k0=1, add=24, free_residents=True)
    assert len(lines) == 1
    assert lines[0].startswith("free_residents = True: ")
    assert warn("xshare", 64, add=EXPERTS, free_residents=True)[0] == lines[0], "also of a plan that drops none"
    assert warn("xshare", 64, k0=1, add=24) == warn("xshare", 64, k0=1, add=24, free_residents=False) == []


def test_a_plan_is_judged_by_the_most_rows_it_is_for():
    """16 experts of 7 a row hold all that two rows want, not what three want."""
    (line,) = warn("xshare", 64, add=24, by_rows={"2": {"add": 16}})
    assert line.startswith("add = 16: 14 ")
    assert warn("xshare", 64, add=24, by_rows={"2-3": {"add": 16}}) == []
    assert len(warn("xshare", 64, add=24, max_rows=3)) == 1
    assert warn("xshare", 2, add=8, by_rows={"16-32": {"add": 48}}) == [], "an override beyond every batch"


@pytest.mark.parametrize(
    ("policy", "keys", "key", "rows", "tokens", "ranks"),
    [
        ("xshare", {"k0": 1}, "add", 3, 1, 1),
        ("xshare", {"k0": 2, "p": 0.1}, "add", 3, 1, 1),
        ("xshare", {"k0": 0}, "add", 2, 1, 1),
        ("xshare", {"k0": 1, "add": 0}, "add_per_request", 3, 3, 1),
        ("xshare", {"k0": 1, "add": 0}, "target_per_rank", 3, 1, 2),
        ("custom", {"ranking": "votes"}, "budget", 3, 1, 1),
        ("custom", {"ranking": "router", "scope": "request"}, "budget", 2, 2, 1),
        ("custom", {"ranking": "router", "coverage": "truncate"}, "budget", 3, 1, 1),
    ],
)
def test_what_is_warned_of_drops_nothing_and_one_expert_less_does(policy, keys, key, rows, tokens, ranks):
    """Rows that want 8 experts each of their own, which they want alike: the hardest batch for a budget."""
    enough = next(n for n in range(1, EXPERTS) if warn(policy, rows // tokens, ranks, tokens, **keys, **{key: n}))
    apart = torch.full((rows, EXPERTS), -9.0)
    for row in range(rows):
        apart[row, row * TOP_K : (row + 1) * TOP_K] = torch.linspace(1, 0.9, TOP_K)
    random = [torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    placement = None if ranks == 1 else torch.arange(EXPERTS) % ranks

    def drops(logits: torch.Tensor, budget: int) -> bool:
        plan = build_plan(policy, **keys, **{key: budget})
        batch = Batch(tokens_per_request=tokens)
        out = select(logits, plan, Router(TOP_K), batch, placement, backend="reference")
        return bool((out.vanilla_active & ~out.active).any())

    assert not any(drops(logits, enough) for logits in [apart, *random])
    assert drops(apart, enough - 1)


def config(**changes: Any) -> SimpleNamespace:
    decode = SimpleNamespace(max_bs=24, backend="full")
    known = {
        "enable_dp_attention": False,
        "max_running_requests": None,
        "cuda_graph_config": SimpleNamespace(decode=decode),
    }
    return SimpleNamespace(**known | changes)


def test_the_largest_batch_is_what_runs_at_once_else_what_is_captured():
    assert largest_batch(config(max_running_requests=16)) == (16, "--max-running-requests")
    assert largest_batch(config()) == (24, "the largest batch captured:")
    off = SimpleNamespace(decode=SimpleNamespace(max_bs=24, backend="disabled"))
    assert largest_batch(config(cuda_graph_config=off)) is None
    assert largest_batch(SimpleNamespace(max_running_requests=None)) is None
