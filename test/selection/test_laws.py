"""Laws between answers, whatever the logits: what holds to the last bit, and of depths that no paper knows."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selection.cases import cases, fill_logits, plans, run, spell, words
from selection.compared import CLOSE, EXACT, HERE, Backend, make_routers
from sglang_xshare import Batch, select
from sglang_xshare.policies import VANILLA

few = Backend("torch").settle(40)
FULL_BUDGETS = words("""
xshare:k0=1,add=32 xshare:k0=0,add=32 xshare:k0=0,add_per_request=32 xshare:k0=1,add=32,utility=squared
xshare:k0=0,mass=1.0 xshare:k0=0,mass=1.0,max_add=32 xshare:target_per_rank=32 xshare:target_per_rank=32,balance=fill
xshare:target_per_rank=32,balance=level oea:k0=4 pruned:k0=4 dynamic-skip:beta=0 lynx-lat:retain=32 lynx-lat:drop=0
lynx-acc:confidence=0.01,max_voters=99,min_votes=1 moe-spec:budget=32 moe-spec:budget=32,coverage=truncate
moe-spec:budget=32,utility=squared moe-spec:budget=32,scope=request
""")


@pytest.mark.parametrize("text", FULL_BUDGETS)
def test_a_full_budget_is_vanilla(text):
    """Weights to the last bit."""
    batch, ranks = Batch(torch.arange(12) % 5 != 3, tokens_per_request=3), torch.arange(32) // 8
    for kind, router in make_routers(32, 4, "cpu").items():
        logits = fill_logits("ties" if "bias" in kind else "normal", 12, 32, seed=7)
        out, vanilla = select(logits, spell(text), router, batch, ranks), select(logits, VANILLA, router, batch)
        for name in ("topk_ids", "topk_weights", "active"):
            assert torch.equal(getattr(out, name), getattr(vanilla, name)), (kind, name)
        assert torch.equal(vanilla.active, vanilla.vanilla_active)


@pytest.mark.parametrize("backend", HERE, indirect=True)
def test_depth_counts_in_verification_alone(backend):
    """A step of one row a request is as without; and with every draft accepted and every row warm, any step. All
    depths beyond the table count as its last.
    """

    @few
    @given(data=st.data())
    def check(data):
        case = data.draw(cases(max_tokens=4))
        plan = data.draw(plans(case, "free"))
        plain = dataclasses.replace(plan, acceptance=1.0, warm_rows=None)
        decode = dataclasses.replace(case, tokens_per_request=1, depth=None)
        all_warm = dataclasses.replace(plain, warm_rows=64 if plan.k0 else None)
        for step, weighed in ((decode, plan), (case, all_warm)):
            found, expected = run(step, weighed, backend.name), run(step, plain, backend.name)
            # Weights of a row whose first choice is sure are divided without a look at whether their sum is 0.
            for name in EXACT + CLOSE:
                one, other = getattr(found, name), getattr(expected, name)
                assert torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True), name
        for one, other in ((255, 10_000), (0, -7), (255, 2**31 - 1)):
            depths = [torch.full((len(case.P),), depth, dtype=torch.int32) for depth in (one, other)]
            first, second = (run(dataclasses.replace(case, depth=depth), plan, backend.name) for depth in depths)
            assert torch.equal(first.selected, second.selected)

    check()
