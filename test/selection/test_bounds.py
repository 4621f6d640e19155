"""Bounds of a plan for any logits: if `can_change` is False, the model's own routing comes out; `max_active` holds."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from selection.cases import EVERY_PLAN, cases, fill_logits, indices, plans, run, spell, words
from selection.compared import Backend, make_routers
from sglang_xshare import Router, build_plan, select
from sglang_xshare.policies import VANILLA, bounds
from sglang_xshare.selection.scores import compute_scores, measure, to_fixed_point

few = Backend("reference").settle(25)
often = Backend("torch").settle(40)


def check_unchanged(case, plan):
    """Compare ids, weights and active experts with the model's: of every row, except experts without any utility."""
    out, vanilla = run(case, plan, "reference"), run(case, VANILLA, "reference")
    scores, _ = compute_scores(case.logits, case.router)
    ids = vanilla.topk_ids.long()
    own = measure(scores, case.router).gather(1, ids.clamp_min(0)).double() * (ids >= 0)
    if plan.utility == "squared":
        own = (own / own.sum(1, keepdim=True)) ** 2
    whole = ((to_fixed_point(own) > 0) | (ids < 0)).all(1)
    assert torch.equal(out.topk_ids[whole], vanilla.topk_ids[whole])
    assert torch.equal(out.topk_weights[whole], vanilla.topk_weights[whole])
    kept = vanilla.kept_mass > 0
    left_out = torch.tensor(2**-10.5 if plan.utility == "squared" else 1e-6)
    if plan.utility == "full":  # of scores, and a bias can choose experts that have next to none together
        left_out = left_out / own.nan_to_num().sum(1)[kept]
    assert out.kept_mass[kept].ge(1 - 16 * left_out - 4e-6).all()
    if whole.all():
        assert torch.equal(out.active, vanilla.active)


@pytest.mark.parametrize("policy", [one for one in EVERY_PLAN if one not in ("vanilla", "lynx-acc", "narrow")])
@few
@given(data=st.data())
def test_a_plan_that_cannot_change_a_step_does_not(policy, data):
    """Of few rows, which many a plan cannot change, and of ranks that hold equally many experts."""
    case = data.draw(cases(max_requests=3, max_experts=32, max_tokens=3))
    case.rank_of_expert = [expert % 4 for expert in range(case.num_experts)]
    plan, slots = data.draw(plans(case, policy)), None if case.resident is None else case.slots
    sizes = case.num_experts, len(case.logits), case.tokens_per_request
    assume(not bounds.can_change(plan, case.router, *sizes, ranks=4, slots=slots))
    check_unchanged(case, plan)


@few
@given(data=st.data())
def test_all_resident_is_vanilla_if_all_fit(data):
    case = data.draw(cases())
    slots = data.draw(st.sampled_from([None, case.num_experts]))
    case = case.but(resident=torch.ones(case.num_experts, dtype=torch.bool), slots=slots)
    k0, utility = data.draw(st.integers(0, case.top_k)), data.draw(st.sampled_from(["topk", "squared", "full"]))
    check_unchanged(case, spell(f"xshare:k0={k0},add={data.draw(st.integers(0, 9))},utility={utility}"))


CANNOT_DROP = words("""
vanilla xshare:add=63 xshare:add=64 xshare:k0=0,add=64 xshare:k0=8,add=0 xshare:add_per_request=64 xshare:mass=1.0
xshare:mass=1.0,max_add=63 xshare:target_per_rank=64 xshare:target_per_rank=64,balance=fill
xshare:target_per_rank=64,balance=level oea:k0=8 oea:k0=8,kmax=9 oea:k0=8,max_rank=7 oea:k0=8,own_share=1
pruned:k0=8 lynx-lat:retain=64 lynx-lat:drop=0 moe-spec:budget=64 moe-spec:budget=64,coverage=truncate
moe-spec:budget=64,scope=request dynamic-skip:beta=0
""")
CANNOT_CHANGE = words("""
xshare:k0=1,add=21 xshare:add=62 xshare:k0=1,add=21,p=0.5 xshare:k0=2,p=0.5,add=62 xshare:k0=1,add=21,utility=squared
xshare:k0=1,add=21,own_share=0.75 xshare:k0=1,mass=1.0,max_add=21 xshare:mass=1.0,max_add=62
xshare:k0=1,add=1,mass=1.0,max_add=20 custom:k0=1,add=21,max_rank=8 custom:k0=1,add=21,coverage=truncate
lynx-lat:retain=24 lynx-lat:retain=63 moe-spec:budget=24,utility=squared custom:budget=24
""")
CAN_CHANGE = words("""
xshare xshare:k0=1,add=20 xshare:k0=2,add=20,p=0.5 xshare:k0=1,add=21,utility=full xshare:k0=1,add=20,utility=squared
xshare:k0=1,add=20,own_share=0.75 xshare:k0=8,p=0.9,add=0 xshare:mass=0.99 xshare:k0=1,mass=1.0,max_add=20
xshare:k0=1,mass=0.99,max_add=21 xshare:mass=0.99,max_add=63 custom:k0=1,add=21,kmax=9 custom:k0=1,add=64,kmax=7
custom:k0=1,add=64,max_rank=7 oea:k0=8,kmax=9 oea:k0=7 oea:k0=7,kmax=7 pruned:k0=7 pruned:k0=8,p=0.9
dynamic-skip:beta=0.1 lynx-acc:confidence=0.1 lynx-lat:retain=23 lynx-lat:drop=1 moe-spec:budget=63
moe-spec:budget=23,utility=squared custom:budget=23
""")


@pytest.mark.parametrize("text", sorted({*CANNOT_DROP, *CANNOT_CHANGE, *CAN_CHANGE}))
def test_three_rows_of_a_top_8_model_of_64_experts(text):
    """Of any router a plan that cannot change them leaves ids, active experts, and weights to the last bit."""
    plan = spell(text)
    assert bounds.can_drop(plan, Router(8), 64) is (text not in CANNOT_DROP)
    assert bounds.can_change(plan, Router(8), 64, 3) is (text in CAN_CHANGE)
    for kind, router in make_routers(64, 8, "cpu").items():
        if bounds.can_change(plan, router, 64, 3) or (plan.own_share and not router.renormalize):
            continue
        logits = fill_logits("ties" if "bias" in kind else "normal", 3, 64, seed=7)
        out, vanilla = select(logits, plan, router, None, torch.arange(64) // 16), select(logits, VANILLA, router)
        for name in ("topk_ids", "topk_weights", "active"):
            assert torch.equal(getattr(out, name), getattr(vanilla, name)), (kind, name)
        assert torch.equal(vanilla.active, vanilla.vanilla_active)


def test_steps_of_drafts_groups_and_slots():
    """What a step has beside its rows: draft tokens, groups with shares, and experts in few slots."""
    router, enough = Router(2), "xshare:k0=1,add=64"
    assert not bounds.can_change(spell(enough), router, 64, 8, 8)
    assert bounds.can_change(spell(f"{enough},acceptance=0.5"), router, 256, 8, 8)
    assert not bounds.can_change(spell(f"{enough},acceptance=0.5"), router, 64, 8, 1)
    # 8 rows of 2 experts, of which each row's warm-up has one, or only the first row's
    assert not bounds.can_change(spell("xshare:k0=1,add=8"), router, 64, 8, 8)
    assert bounds.can_change(spell("xshare:k0=1,add=7"), router, 64, 8, 8)
    assert not bounds.can_change(spell("xshare:k0=1,add=15,warm_rows=1"), router, 64, 8, 8)
    assert bounds.can_change(spell("xshare:k0=1,add=14,warm_rows=1"), router, 64, 8, 8)
    assert bounds.can_change(spell("xshare:k0=1,add=7,warm_rows=64"), router, 64, 8, 8)
    assert bounds.can_drop(spell("xshare:k0=2,add=0,warm_rows=1"), router, 64)
    # A request of 4 rows wants 4 experts beside those of its warm-up.
    assert not bounds.can_change(spell("xshare:k0=1,add_per_request=4"), router, 64, 8, 4)
    assert bounds.can_change(spell("xshare:k0=1,add_per_request=3"), router, 64, 8, 4)
    # A request of 4 rows ranks the 8 experts that it wants, however many requests there are.
    assert not bounds.can_change(spell("custom:budget=8,scope=request"), router, 64, 8, 4)
    assert bounds.can_change(spell("custom:budget=7,scope=request"), router, 64, 8, 4)
    # A late draft's utility may round to 0.
    assert bounds.can_drop(spell("xshare:k0=0,add=8,acceptance=0.01"), Router(1), 8)
    # A group's best may lie far down the row's own ranking.
    grouped, limited = Router(8, quota_groups=2), spell("custom:k0=1,add=21,max_rank=8")
    assert (select(torch.arange(64.0, 0, -1).repeat(3, 1), limited, grouped).topk_ids == -1).any()
    assert bounds.can_change(limited, grouped, 64, 3)
    assert not bounds.can_change(spell("custom:k0=1,add=21"), grouped, 64, 3)
    assert bounds.can_drop(spell("oea:k0=7,max_rank=8"), grouped, 64)
    for slots, can_change in ((None, False), (24, False), (23, True)):
        assert bounds.can_change(spell("xshare:k0=1,add=24"), Router(8), 64, 3, slots=slots) is can_change
        without = spell("xshare:k0=1,add=24,free_residents=false")
        assert not bounds.can_change(without, Router(8), 64, 3, slots=slots)
    assert bounds.can_change(spell("xshare:k0=1,add=64,utility=full"), Router(8), 64, 3, slots=32)


def test_budgets_of_a_static_order_and_of_ranks():
    """An order may begin with the experts of no row. A rank that stops at its own target may leave out a row's."""
    static = build_plan("custom", budget=24, ranking="static", order=[*range(64)])
    assert bounds.can_change(static, Router(8), 64, 3)
    for keys, can_change in (("4", False), ("3", True), ("4,balance=fill", True), ("4,balance=level", True)):
        plan = spell(f"xshare:target_per_rank={keys}")
        assert bounds.can_change(plan, Router(8), 64, 3, ranks=7) is can_change, keys


@pytest.mark.parametrize("policy", EVERY_PLAN)
@often
@given(data=st.data())
def test_a_plan_bounds_its_active_experts(policy, data):
    """A server that pages experts, and so serves no exact rows, relies on the bound; S itself fits the slots, except
    what rows and requests bring.
    """
    case = data.draw(cases()).but(exact=None)
    if case.slots is None:
        case = case.but(resident=None)  # as many join as there are
    plan, slots = data.draw(plans(case, policy)), None if case.resident is None else case.slots
    found, sizes = run(case, plan, "torch"), (case.num_experts, len(case.P), case.tokens_per_request, slots)
    assert found.active.sum() <= bounds.max_active(plan, case.router, *sizes)
    if slots and plan.takes_residents and not plan.can_rescue:
        sure = len(case.rows) * plan.warm_up(case.router) + len(case.requests()) * plan.add_per_request
        assert len(indices(found.selected)) <= max(slots, sure)


MAX_ACTIVE = [  # slots, {policy: experts}: of 16 rows in requests of 4, of a top-8 model of 200 experts
    (None, {"vanilla": 128, "pruned:k0=2": 32, "oea:k0=3": 48, "lynx-lat:retain=2": 8, "lynx-lat:drop=2": 128}),
    (None, {"xshare:k0=1,add=24": 40, "xshare:k0=1,add_per_request=4": 16 + 4 * 4, "xshare:k0=1,add=500": 128}),
    (None, {"xshare:k0=1,mass=0.5": 128, "xshare:k0=1,mass=0.5,max_add=24": 40}),
    (None, {"xshare:k0=1,add=2,mass=0.5,max_add=24": 42, "custom:k0=1,add=500,kmax=4": 16 * 4}),
    (None, {"xshare:k0=1,mass=0.5,max_add=24,target_per_rank=2": 128}),
    (None, {"moe-spec:budget=20": 20, "moe-spec:budget=20,scope=request": 80}),
    (None, {"moe-spec:budget=20,coverage=truncate": 36}),
    # Residents join up to the slots, beside what rows and requests alone may bring.
    (32, {"xshare:k0=1,add=4": 32, "xshare:k0=1,mass=0.9": 32, "xshare:k0=3,add=0": 48, "moe-spec:budget=40": 40}),
    (32, {"xshare:k0=1,mass=0.9,max_add=4,free_residents=false": 20, "xshare:k0=1,add=4,free_residents=false": 20}),
    (32, {"xshare:k0=1,add_per_request=6": 16 + 4 * 6, "custom:k0=0,add=9,coverage=truncate": 32 + 16}),
]


@pytest.mark.parametrize(("slots", "wanted"), MAX_ACTIVE)
def test_max_active(slots, wanted):
    found = {text: bounds.max_active(spell(text), Router(8), 200, 16, 4, slots) for text in wanted}
    assert found == wanted


def test_a_step_without_rows_counts_as_one_with_an_active_expert():
    """The plans have each kind of budget: page slots, no fixed size, and a fixed size."""
    for text, slots in (("xshare:k0=1,add=4", 32), ("xshare:k0=1,mass=0.5", None), ("xshare:k0=1,add=4", None)):
        assert bounds.max_active(spell(text), Router(8), 200, 0, slots=slots) == 1, (text, slots)


def test_a_step_may_have_as_many_experts_as_slots():
    """The model routes by itself, or the warm-ups alone exceed the smaller number of slots."""
    for plan, rows, most in ((None, 4, 32), (spell("xshare:k0=3,add=0"), 16, 48)):
        fits = [bounds.fits_slots(plan, Router(8), 200, rows, 4, slots) for slots in (most - 1, most)]
        assert fits == [False, True]
