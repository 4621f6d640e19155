"""A plan's numbers are data: they change without another kernel, and few kernels serve all batch sizes."""

import pytest
import torch

from selection.cases import spell
from selection.compared import DEVICE, HAS_GPU, check_same, make_logits, make_ranks
from selection.hopper import compiling
from selection.live import select_live
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.policies.bounds import open_up
from sglang_xshare.selection.triton_kernel.budgets import NUMBERS, Budgets, find_budgets

CHANGES = {
    "add": "xshare:k0=1,add=24 xshare:k0=3,add=2 xshare:k0=6,add=0",
    "utility alone": "xshare:k0=0,add=9 xshare:k0=1,add=500",
    "add per request": "xshare:k0=1,add=2,add_per_request=4 xshare:k0=0,add=0,add_per_request=7 xshare:k0=2,add=5",
    "shares": "xshare:k0=2,p=0.6,mass=0.7,utility=full xshare:k0=4,p=0.3,mass=0.9,utility=full "
    "xshare:k0=3,p=1.0,add=0,utility=full xshare:k0=4,p=0.9,mass=1.0,utility=full",
    "capped mass": "xshare:k0=1,mass=0.9,max_add=5 xshare:k0=1,mass=0.9 xshare:k0=1,mass=0.4,max_add=9",
    "ranks": "xshare:k0=1,target_per_rank=5 xshare:k0=1,target_per_rank=9",
    "reach": "oea:k0=3,p=0.5,kmax=7,max_rank=12 oea:k0=1,kmax=7,max_rank=3 oea:k0=2,kmax=7",
    "votes": "lynx-lat:retain=24 lynx-lat:retain=7 lynx-lat:drop=9",
    "voters": "lynx-acc:confidence=0.2 lynx-acc:confidence=0.9,max_voters=2,min_votes=1",
    "budget": "moe-spec:budget=20 moe-spec:budget=3",
    "rescue": "custom:k0=0,budget=6,coverage=truncate custom:k0=0,budget=2,coverage=truncate "
    "custom:k0=2,budget=9,coverage=truncate",
    "own share": "xshare:k0=0,add=9,own_share=0.75 xshare:k0=1,add=3,own_share=1 xshare:k0=0,add=3,own_share=0",
    "drafts": "xshare:k0=1,add=5,acceptance=0.5,warm_rows=2 xshare:k0=1,add=5,acceptance=0.9,warm_rows=3",
    "skipping": "dynamic-skip:beta=0.4 dynamic-skip:beta=0.9",
}


@pytest.mark.parametrize(("rows", "experts"), [(8, 40), (24, 128)])
@pytest.mark.parametrize("change", CHANGES)
def test_numbers_change_under_the_same_kernel(run, change, rows, experts):
    """In one program and in several: what the reference finds by the plan whose numbers were written last, which at the
    end are those of a graph that has to be vanilla.
    """
    plans, router = [spell(text) for text in CHANGES[change].split()], Router(6)
    if change != "reach":
        plans.append(open_up(plans[0], router))
    # Of wide logits the best expert has a whole row's score on the grid, and a share of 1 takes others all the same.
    logits = make_logits("wide" if change == "shares" else "normal", rows, experts, seed=rows)
    call = router, Batch(torch.arange(rows, device=DEVICE) % 5 != 3, 4), make_ranks(logits)
    for plan, found in zip(plans, run(select_live, logits, plans, *call), strict=True):
        check_same(found, select(logits, plan, *call, backend="reference"))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("k0=1,add=5", "k0=1,mass=0.5", "mass = 0.5: must .* made for, None"),
        ("k0=1,mass=0.5", "k0=1,add=5", "add = 5: must .* made for, 0"),
        ("k0=1,add=5", "k0=1,add=5,utility=full", "utility = 'full': must .* made for, 'topk'"),
        ("k0=1,add=5", "k0=1,add=5,own_share=0.5", "own_share = 0.5: must .* made for, 0.0"),
        ("k0=1,add=5", "k0=1,add=5,p=0.5", "p = 0.5: must .* made for, 1.0"),
        ("k0=1,add=5", "k0=1,add=5,kmax=3", "kmax = 3: must .* made for, None"),
        ("k0=1,add=5", "k0=1,budget=5", "budget or drop: must .* absent"),
        ("k0=1,budget=5", "k0=1,add=0", "budget or drop: must .* set"),
        ("k0=1,add=5", "k0=1,confidence=0.5", "confidence: must .* absent"),
        ("k0=1,budget=5,coverage=truncate", "k0=0,budget=5,coverage=truncate", "k0 = 0: must .* made for, 1"),
    ],
)
def test_what_takes_another_kernel_is_refused(first, second, message):
    budgets = Budgets(spell(f"custom:{first}"), torch.device("cpu"))
    before = budgets.values.clone()
    with pytest.raises(ValueError, match=message):
        budgets.write(spell(f"custom:{second}"))
    assert torch.equal(budgets.values, before)


def test_a_plan_has_one_buffer_which_stays():
    """A captured graph reads it where it lies."""
    device = torch.device("cpu")
    budgets = find_budgets(spell("xshare:k0=2,add=7"), device)
    for add in range(500):
        find_budgets(spell(f"xshare:k0=2,add={add}"), device)
    assert find_budgets(spell("xshare:k0=2,add=7"), device) is budgets
    assert budgets.values[NUMBERS.index("add")] == 7
    assert budgets.values.is_contiguous()


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: its own driver counts")
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_kernel_for_each_tile_serves_all_sizes_and_budgets(tokens):
    """1 to 64 rows, or 1 to 16 requests of 4 draft tokens, of 128 experts, two budgets, addresses aligned or not, slots
    filled: tiles of 8 and 16 rows, and those of many programs. That is what a server's first start compiles for a
    policy, before Triton's cache on disk knows it: 1.6 to 2.0 s of CPU time each with Triton 3.9.0, on one Xeon core.
    """
    plans = [spell(f"xshare:k0=1,{'add' if tokens == 1 else 'add_per_request'}={number}") for number in (4, 500)]
    with compiling() as compiled:
        for rows in range(tokens, 65, tokens):
            logits, valid = torch.zeros(rows, 128).bfloat16(), torch.ones(rows + 1, dtype=torch.bool)
            for plan in plans:
                batch = Batch(valid[rows % 2 : rows + rows % 2], tokens)
                select(logits, plan, Router(8), batch, backend="triton", slots=RunnerSlots())
    assert len(compiled.kernels) == 3
