"""Laws between answers, whatever the logits: they need no oracle, and hold between calls of one backend."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from selection.cases import EVERY_PLAN, cases, fill_logits, indices, keys_for, pad_columns, plans, run, spell, words
from selection.compared import HERE, Backend, make_routers
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, build_plan, select
from sglang_xshare.policies import VANILLA

EVERY_POLICY = pytest.mark.parametrize("policy", ALGORITHMS)
few = Backend("torch").settle(40)
FULL_BUDGETS = words("""
xshare:k0=1,add=32 xshare:k0=0,add=32 xshare:k0=0,add_per_request=32 xshare:k0=1,add=32,utility=squared
xshare:k0=0,mass=1.0 xshare:k0=0,mass=1.0,max_add=32 xshare:target_per_rank=32 xshare:target_per_rank=32,balance=fill
xshare:target_per_rank=32,balance=level oea:k0=4 pruned:k0=4 dynamic-skip:beta=0 lynx-lat:retain=32 lynx-lat:drop=0
lynx-acc:confidence=0.01,max_voters=99,min_votes=1 moe-spec:budget=32 moe-spec:budget=32,coverage=truncate
moe-spec:budget=32,utility=squared moe-spec:budget=32,scope=request
""")
EXACTLY = ("topk_ids", "selected", "active", "vanilla_active", "rescued")


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


@few
@given(case=cases(), data=st.data())
def test_a_larger_budget_never_removes_an_expert(case, data):
    case = dataclasses.replace(case, slots=None)  # which it would fill, in place of residents
    small = data.draw(st.integers(1, case.num_experts - 1))
    large = data.draw(st.integers(small + 1, case.num_experts))
    mass = sorted(data.draw(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1))))
    k0 = data.draw(st.integers(0, case.top_k))
    for policy, key, values in [
        ("xshare", "add", (small, large)),
        ("xshare", "add_per_request", (small, large)),
        ("xshare", "target_per_rank", (small, large)),
        ("xshare", "mass", mass),
        ("xshare", "max_add", (small, large)),
        ("lynx-lat", "retain", (small, large)),
        ("lynx-lat", "drop", (large, small)),
        ("moe-spec", "budget", (small, large)),
    ]:
        others = {"k0": k0, "utility": data.draw(st.sampled_from(["topk", "squared"]))} if policy == "xshare" else {}
        others |= {"mass": mass[1]} if key == "max_add" else {}
        both = [build_plan(policy, **others, **{key: value}) for value in values]
        less, more = (indices(run(case, plan, "torch").selected) for plan in both)
        assert less <= more, (policy, key)


@EVERY_POLICY
@few
@given(data=st.data())
def test_permuting_the_requests_permutes_the_answer(policy, data):
    case = data.draw(cases())
    # Which of two equally confident rows votes depends on their order.
    grid = [[round(score * 2**20) for score in row] for row in case.M]
    assume(policy != "lynx-acc" or len({max(row) / (sum(row) or 1) for row in grid}) == len(grid))
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    tokens = case.tokens_per_request
    requests = data.draw(st.permutations(range(len(case.P) // tokens)))
    order = torch.tensor([r * tokens + t for r in requests for t in range(tokens)])
    flags = {name: getattr(case, name) for name in ("valid", "exact", "depth")}
    moved = {name: None if flag is None else flag[order] for name, flag in flags.items()}
    out, permuted = (
        run(one, plan, "torch") for one in (case, dataclasses.replace(case, logits=case.logits[order], **moved))
    )
    assert torch.equal(permuted.topk_ids, out.topk_ids[order])
    # torch's sigmoid differs in the last bit between the vector part of a tensor and its tail.
    assert torch.allclose(permuted.topk_weights, out.topk_weights[order], rtol=1e-6, atol=0)
    assert torch.equal(permuted.selected, out.selected)


@EVERY_POLICY
@few
@given(data=st.data())
def test_padding_requests_change_nothing(policy, data):
    """Padding anywhere, whatever its logits and marks: real rows, S and counts are as without it."""
    case = data.draw(cases())
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    tokens = case.tokens_per_request
    is_real = data.draw(st.lists(st.booleans(), max_size=4)) + [True] * (len(case.P) // tokens)
    is_real = torch.tensor(data.draw(st.permutations(is_real))).repeat_interleave(tokens)
    # The first real requests are the batch; all others are padding.
    real = is_real.nonzero().flatten()[: len(case.P)]
    logits = fill_logits("special", len(is_real), case.num_experts, seed=3).to(case.logits.dtype)
    logits[real] = case.logits
    padding = {"valid": torch.zeros(len(is_real), dtype=torch.bool)}
    padding["valid"][real] = True if case.valid is None else case.valid
    for name, value in (("exact", torch.tensor(True)), ("depth", torch.tensor(7, dtype=torch.int32))):
        if (flag := getattr(case, name)) is not None:
            padding[name] = value.repeat(len(is_real))
            padding[name][real] = flag
    out, padded = (run(one, plan, "torch") for one in (case, dataclasses.replace(case, logits=logits, **padding)))
    assert torch.equal(padded.topk_ids[real], out.topk_ids)
    assert torch.allclose(padded.topk_weights[real], out.topk_weights, rtol=1e-6, atol=0)
    assert (padded.topk_ids[~padding["valid"]] == -1).all()
    for name in ("topk_weights", "kept_mass"):
        assert (getattr(padded, name)[~padding["valid"]] == 0).all()
    for name in EXACTLY[1:]:
        assert torch.equal(getattr(padded, name), getattr(out, name)), name


@few
@given(data=st.data())
def test_no_row_exact_is_as_without(data):
    """To the last bit, except for the columns that an exact row would need."""
    case = data.draw(cases())
    plan = data.draw(plans(case, data.draw(st.sampled_from(EVERY_PLAN))))
    nobody = dataclasses.replace(case, exact=torch.zeros(len(case.P), dtype=torch.bool))
    out, without = (run(one, plan, "torch") for one in (nobody, dataclasses.replace(case, exact=None)))
    columns = out.topk_ids.shape[1]
    assert columns == max(plan.kmax or 0, case.top_k)
    assert torch.equal(out.topk_ids, pad_columns(without.topk_ids, columns, -1))
    assert torch.equal(out.topk_weights, pad_columns(without.topk_weights, columns, 0.0))
    for name in EXACTLY[1:]:
        assert torch.equal(getattr(out, name), getattr(without, name)), name


@few
@given(data=st.data())
def test_residents_change_nothing_if_no_batch_names_them_or_the_plan_takes_none(data):
    case = data.draw(cases())
    policy = data.draw(st.sampled_from(["xshare", "oea"]))
    keys = data.draw(keys_for(policy, case))
    found = [run(dataclasses.replace(case, resident=None), build_plan(policy, **keys), "torch")]
    for free, resident in ((True, None), (False, None), (False, case.resident)):
        plan = build_plan(policy, **{**keys, "free_residents": free})
        found.append(run(dataclasses.replace(case, resident=resident), plan, "torch"))
    for out in found[1:]:
        for name in (*EXACTLY, "topk_weights"):
            assert torch.equal(getattr(out, name), getattr(found[0], name)), name


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
            for name in (*EXACTLY, "topk_weights", "kept_mass"):
                one, other = getattr(found, name), getattr(expected, name)
                assert torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True), name
        for one, other in ((255, 10_000), (0, -7), (255, 2**31 - 1)):
            depths = [torch.full((len(case.P),), depth, dtype=torch.int32) for depth in (one, other)]
            first, second = (run(dataclasses.replace(case, depth=depth), plan, backend.name) for depth in depths)
            assert torch.equal(first.selected, second.selected)

    check()
