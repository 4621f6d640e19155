"""A plan's numbers are data: they change without another kernel, and few kernels serve all batch sizes."""

import pytest
import torch

from selection.compared import CLOSE, DEVICE, EXACT, HAS_GPU, make_logits, make_ranks, run
from selection.live import select_live
from selection.variants import compiling
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.selection.triton_kernel.budgets import NUMBERS, Budgets, find_budgets
from sglang_xshare.stage.graphs import open_up

__all__ = ["run"]
CHANGES = {
    "add": [
        {"policy": "xshare", "k0": 1, "add": 24},
        {"policy": "xshare", "k0": 3, "add": 2},
        {"policy": "xshare", "k0": 6, "add": 0},
    ],
    "utility alone": [{"policy": "xshare", "k0": 0, "add": 9}, {"policy": "xshare", "k0": 1, "add": 500}],
    "add per request": [
        {"policy": "xshare", "k0": 1, "add": 2, "add_per_request": 4},
        {"policy": "xshare", "k0": 0, "add": 0, "add_per_request": 7},
        {"policy": "xshare", "k0": 2, "add": 5, "add_per_request": 0},
    ],
    "shares": [
        {"policy": "xshare", "k0": 2, "p": 0.6, "mass": 0.7, "utility": "full"},
        {"policy": "xshare", "k0": 4, "p": 0.3, "mass": 0.9, "utility": "full"},
        {"policy": "xshare", "k0": 3, "p": 1.0, "add": 0, "utility": "full"},
        {"policy": "xshare", "k0": 4, "p": 0.9, "mass": 1.0, "utility": "full"},
    ],
    "capped mass": [
        {"policy": "xshare", "k0": 1, "mass": 0.9, "max_add": 5},
        {"policy": "xshare", "k0": 1, "mass": 0.9},
        {"policy": "xshare", "k0": 1, "mass": 0.4, "max_add": 9},
    ],
    "ranks": [{"policy": "xshare", "k0": 1, "target_per_rank": 5}, {"policy": "xshare", "k0": 1, "target_per_rank": 9}],
    "reach": [
        {"policy": "oea", "k0": 3, "p": 0.5, "kmax": 7, "max_rank": 12},
        {"policy": "oea", "k0": 1, "kmax": 7, "max_rank": 3},
        {"policy": "oea", "k0": 2, "kmax": 7},
    ],
    "votes": [
        {"policy": "lynx-lat", "retain": 24},
        {"policy": "lynx-lat", "retain": 7},
        {"policy": "lynx-lat", "drop": 9},
    ],
    "voters": [
        {"policy": "lynx-acc", "confidence": 0.2},
        {"policy": "lynx-acc", "confidence": 0.9, "max_voters": 2, "min_votes": 1},
    ],
    "budget": [{"policy": "moe-spec", "budget": 20}, {"policy": "moe-spec", "budget": 3}],
    "rescue": [
        {"policy": "custom", "k0": 0, "budget": 6, "coverage": "truncate"},
        {"policy": "custom", "k0": 0, "budget": 2, "coverage": "truncate"},
        {"policy": "custom", "k0": 2, "budget": 9, "coverage": "truncate"},
    ],
    "own share": [
        {"policy": "xshare", "k0": 0, "add": 9, "own_share": 0.75},
        {"policy": "xshare", "k0": 1, "add": 3, "own_share": 1},
        {"policy": "xshare", "k0": 0, "add": 3, "own_share": 0},
    ],
    "skipping": [{"policy": "dynamic-skip", "beta": 0.4}, {"policy": "dynamic-skip", "beta": 0.9}],
}


@pytest.mark.parametrize(("rows", "experts"), [(8, 40), (24, 128)])
@pytest.mark.parametrize("change", CHANGES)
def test_numbers_change_under_the_same_kernel(run, change, rows, experts):
    """In one program and in several: what the reference finds by the plan whose numbers were written last."""
    plans = [build_plan(keys) for keys in CHANGES[change]]
    logits, ranks = make_logits("normal", rows, experts, seed=rows), make_ranks(experts)
    batch = Batch(torch.arange(rows, device=DEVICE) % 5 != 3, 4)
    for plan, found in zip(plans, run(select_live, logits, plans, Router(6), batch, ranks), strict=True):
        expected = select(logits, plan, Router(6), batch, ranks, backend="reference")
        for name in EXACT:
            assert torch.equal(getattr(found, name), getattr(expected, name)), (plan, name)
        for name in CLOSE:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"policy": "xshare", "k0": 1, "add": 2},
        {"policy": "xshare", "k0": 1, "p": 0.5, "mass": 0.4, "utility": "full"},
        {"policy": "lynx-acc", "confidence": 0.2},
        {"policy": "custom", "k0": 0, "budget": 3, "coverage": "truncate"},
        {"policy": "dynamic-skip", "beta": 0.6},
    ],
    ids=lambda keys: keys["policy"],
)
def test_opened_up_numbers_route_as_the_model(run, keys):
    """What a graph that has to be vanilla reads: every row has its own top-k, at the model's weights."""
    plan, router = build_plan(keys), Router(6)
    logits, batch = make_logits("normal", 8, 40, seed=8), Batch(torch.arange(8, device=DEVICE) % 5 != 3, 4)
    dropping, found = run(select_live, logits, [plan, open_up(plan, router)], router, batch, None)
    expected = select(logits, VANILLA, router, batch, backend="reference")
    for name in EXACT:
        if name != "selected":  # of which no row takes more than its own
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in CLOSE:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-6, rtol=2e-6)
    assert dropping.active.sum() < found.active.sum()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"k0": 1, "add": 5}, {"k0": 1, "mass": 0.5}, "mass = 0.5: allowed .* is what it was made for, None"),
        ({"k0": 1, "mass": 0.5}, {"k0": 1, "add": 5}, "add = 5: allowed .* is what it was made for, 0"),
        ({"k0": 1, "add": 5}, {"k0": 1, "add": 5, "utility": "full"}, "utility = 'full': .* made for, 'topk'"),
        ({"k0": 1, "add": 5}, {"k0": 1, "add": 5, "own_share": 0.5}, "own_share = 0.5: .* made for, 0.0"),
        ({"k0": 1, "add": 5}, {"k0": 1, "add": 5, "p": 0.5}, "p = 0.5: .* made for, 1.0"),
        ({"k0": 1, "add": 5}, {"k0": 1, "add": 5, "kmax": 3}, "kmax = 3: .* made for, None"),
        ({"k0": 1, "add": 5}, {"k0": 1, "budget": 5}, "budget or drop: .* is none"),
        ({"k0": 1, "budget": 5}, {"k0": 1, "add": 0}, "budget or drop: .* is some"),
        ({"k0": 1, "add": 5}, {"k0": 1, "confidence": 0.5}, "confidence: .* is none"),
        (
            {"k0": 1, "budget": 5, "coverage": "truncate"},
            {"k0": 0, "budget": 5, "coverage": "truncate"},
            "k0 = 0: .* made for, 1",
        ),
    ],
)
def test_what_takes_another_kernel_is_refused(first, second, message):
    budgets = Budgets(build_plan("custom", **first), torch.device("cpu"))
    before = budgets.values.clone()
    with pytest.raises(ValueError, match=message):
        budgets.write(build_plan("custom", **second))
    assert torch.equal(budgets.values, before)


def test_a_plan_has_one_buffer_which_stays():
    """A captured graph reads it where it lies."""
    plan, device = build_plan("xshare", k0=2, add=7), torch.device("cpu")
    budgets = find_budgets(plan, device)
    for add in range(500):
        find_budgets(build_plan("xshare", k0=2, add=add), device)
    assert find_budgets(build_plan("xshare", k0=2, add=7), device) is budgets
    assert budgets.values[NUMBERS.index("add")] == 7
    assert budgets.values.is_contiguous()


def test_numbers_beyond_any_count():
    """What is more than 32 bits hold is as good as all."""
    budgets = Budgets(build_plan("xshare", k0=1, add=2**40), torch.device("cpu"))
    assert budgets.values[NUMBERS.index("add")] == 2**31 - 1


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: its own driver counts")
def test_a_kernel_for_each_tile_serves_all_sizes_and_budgets():
    """1 to 64 rows of 128 experts, four budgets, addresses aligned or not, slots filled: tiles of 8 and 16 rows, and
    those of many programs. That is what a server's first start compiles for a policy, before Triton's cache on disk
    knows it: 1.6 to 2.0 s of CPU time each with Triton 3.9.0, on one core of a Xeon.
    """
    with compiling() as compiled:
        for rows in range(1, 65):
            logits, valid = torch.randn(rows, 128).bfloat16(), torch.ones(rows + 1, dtype=torch.bool)
            for k0, add in ((1, 24), (1, 3), (2, 12), (0, 500)):
                plan, live = build_plan("xshare", k0=k0, add=add), valid[rows % 2 : rows + rows % 2]
                select(logits, plan, Router(8), Batch(live), backend="triton", slots=RunnerSlots())
    print(f"compiled in {', '.join(f'{seconds:.1f} s' for seconds in compiled.seconds)}")
    assert len(compiled.kernels) == len(compiled.seconds) == 3


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: its own driver counts")
def test_a_kernel_for_each_tile_serves_requests():
    """1 to 32 requests of 4 draft tokens: the same three tiles."""
    with compiling() as compiled:
        for requests in range(1, 33):
            logits = torch.randn(4 * requests, 128).bfloat16()
            for add in (4, 5):
                plan = build_plan("xshare", k0=1, add_per_request=add)
                select(logits, plan, Router(8), Batch(tokens_per_request=4), backend="triton", slots=RunnerSlots())
    assert len(compiled.kernels) == 3
