"""What must hold between answers, whatever the logits: laws that need no oracle."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from selection.cases import OWN_SHARES, cases, fill_logits, indices, keys_for, run
from selection.draws import pad_columns
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, Router, build_plan, select

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EVERY_POLICY = pytest.mark.parametrize("policy", ALGORITHMS)
BIAS = torch.linspace(-0.1, 0.1, 32)
ROUTERS = {
    "softmax": Router(4),
    "softmax, not renormalizing": Router(4, renormalize=False),
    "sigmoid": Router(4, "sigmoid"),
    "sigmoid with bias": Router(4, "sigmoid", BIAS),
    "group-limited": Router(4, "sigmoid", BIAS, num_expert_group=4, topk_group=2),
    "group-limited without bias": Router(4, num_expert_group=8, topk_group=3),
}
FULL_BUDGETS: dict[str, dict[str, Any]] = {
    "xshare": {"k0": 1, "add": 32},
    "xshare, no warm-up": {"policy": "xshare", "k0": 0, "add": 32},
    "xshare per request": {"policy": "xshare", "k0": 0, "add_per_request": 32},
    "xshare of squares": {"policy": "xshare", "k0": 1, "add": 32, "utility": "squared"},
    "xshare by mass": {"policy": "xshare", "k0": 0, "mass": 1.0},
    "xshare by capped mass": {"policy": "xshare", "k0": 0, "mass": 1.0, "max_add": 32},
    "xshare per rank": {"policy": "xshare", "target_per_rank": 32},
    "xshare per rank, filled": {"policy": "xshare", "target_per_rank": 32, "balance": "fill"},
    "xshare per rank, level": {"policy": "xshare", "target_per_rank": 32, "balance": "level"},
    "oea": {"k0": 4},
    "pruned": {"k0": 4},
    "dynamic-skip": {"beta": 0},
    "lynx-lat": {"retain": 32},
    "lynx-lat without drops": {"policy": "lynx-lat", "drop": 0},
    "lynx-acc": {"confidence": 0.01, "max_voters": 99, "min_votes": 1},
    "moe-spec": {"budget": 32},
    "moe-spec, truncating": {"policy": "moe-spec", "budget": 32, "coverage": "truncate"},
    "moe-spec, static": {"policy": "moe-spec", "budget": 32, "ranking": "static", "order": list(range(32))},
    "moe-spec of squares": {"policy": "moe-spec", "budget": 32, "utility": "squared"},
    "moe-spec per request": {"policy": "moe-spec", "budget": 32, "scope": "request"},
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("name", FULL_BUDGETS)
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_a_full_budget_is_vanilla(router, name, kind):
    """Weights to the last bit; and what vanilla is, upstream's formula says."""
    logits = fill_logits(kind, 12, 32, seed=7)
    batch = Batch(torch.arange(12) % 5 != 3, tokens_per_request=3)
    ranks = torch.arange(32) // 8
    plan = build_plan({"policy": name, **FULL_BUDGETS[name]})
    out = select(logits, plan, router, batch, ranks)
    vanilla = select(logits, build_plan("vanilla"), router, batch)
    assert torch.equal(out.topk_ids, vanilla.topk_ids)
    assert torch.equal(out.topk_weights, vanilla.topk_weights)
    assert torch.equal(out.active, vanilla.active)
    assert torch.equal(vanilla.active, vanilla.vanilla_active)


@few
@given(data=st.data())
def test_own_share_changes_nothing_but_the_weights_of_rows_that_lost_mass(data):
    """It keeps ids and S, and a row's own experts' weights to the last bit; with 1 no weight is above the model's."""
    case = dataclasses.replace(data.draw(cases()), renormalize=True)
    policy = data.draw(st.sampled_from(OWN_SHARES))
    keys = {**data.draw(keys_for(policy, case)), "own_share": data.draw(st.sampled_from([0.25, 0.75, 1]))}
    assume(keys.get("coverage") != "truncate")
    plan = build_plan(policy, **keys)
    out, published = run(case, plan, "torch"), run(case, dataclasses.replace(plan, own_share=0.0), "torch")
    vanilla = run(case, build_plan("vanilla"), "torch")
    assert torch.equal(out.topk_ids, published.topk_ids)
    assert torch.equal(out.selected, published.selected)
    own = pad_columns(vanilla.topk_ids, out.topk_ids.shape[1], -1)
    if out.topk_ids.shape[1] == case.top_k:
        whole = (out.topk_ids == own).all(1)
        assert torch.equal(out.topk_weights[whole], vanilla.topk_weights[whole])
    if plan.own_share == 1:
        same = (out.topk_ids.unsqueeze(2) == own.unsqueeze(1)) & (out.topk_ids >= 0).unsqueeze(2)
        allowed = (pad_columns(vanilla.topk_weights, own.shape[1], 0.0).unsqueeze(1) * same).sum(2)
        assert (out.topk_weights <= allowed + 1e-6)[same.any(2)].all()


def test_vanilla_is_upstreams_top_k():
    """Softmax over all experts, the k largest, divided by their sum."""
    logits = fill_logits("normal", 20, 64, seed=1)
    out = select(logits, build_plan("vanilla"), Router(8))
    weights, ids = logits.softmax(-1).topk(8)
    assert torch.equal(out.topk_ids, ids.int())
    assert torch.equal(out.topk_weights, weights / weights.sum(-1, keepdim=True))


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
        plans = [build_plan(policy, **others, **{key: value}) for value in values]
        less, more = (indices(run(case, plan, "torch").selected) for plan in plans)
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
    flags = {name: None if (all_ := getattr(case, name)) is None else all_[order] for name in ("valid", "exact")}
    out = run(case, plan, "torch")
    permuted = run(dataclasses.replace(case, logits=case.logits[order], **flags), plan, "torch")
    assert torch.equal(permuted.topk_ids, out.topk_ids[order])
    # torch's sigmoid differs in the last bit between the vector part of a tensor and its tail.
    assert torch.allclose(permuted.topk_weights, out.topk_weights[order], rtol=1e-6, atol=0)
    assert torch.equal(permuted.selected, out.selected)


@EVERY_POLICY
@few
@given(data=st.data())
def test_padding_requests_change_nothing(policy, data):
    """Padding anywhere, whatever its logits: real rows, S and counts are as without it."""
    case = data.draw(cases())
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    tokens = case.tokens_per_request
    is_real = data.draw(st.lists(st.booleans(), max_size=4)) + [True] * (len(case.P) // tokens)
    is_real = torch.tensor(data.draw(st.permutations(is_real))).repeat_interleave(tokens)
    # The first real requests are the batch; all others are padding.
    real = is_real.nonzero().flatten()[: len(case.P)]
    logits = fill_logits("special", len(is_real), case.num_experts, seed=3).to(case.logits.dtype)
    logits[real] = case.logits
    valid = torch.zeros(len(is_real), dtype=torch.bool)
    valid[real] = True if case.valid is None else case.valid
    exact = None
    if case.exact is not None:
        exact = torch.ones(len(is_real), dtype=torch.bool)  # no padding row is
        exact[real] = case.exact
    depth = None
    if case.depth is not None:
        depth = torch.full((len(is_real),), 7, dtype=torch.int32)
        depth[real] = case.depth
    out = run(case, plan, "torch")
    padded = run(dataclasses.replace(case, logits=logits, valid=valid, exact=exact, depth=depth), plan, "torch")
    assert torch.equal(padded.topk_ids[real], out.topk_ids)
    assert torch.allclose(padded.topk_weights[real], out.topk_weights, rtol=1e-6, atol=0)
    assert (padded.topk_ids[~valid] == -1).all()
    assert (padded.topk_weights[~valid] == 0).all()
    assert (padded.kept_mass[~valid] == 0).all()
    for name in ("selected", "active", "vanilla_active", "rescued"):
        assert torch.equal(getattr(padded, name), getattr(out, name)), name


def test_bias_and_groups_decide():
    """The laws above would hold for a router that ignored them."""
    case_logits = torch.zeros(1, 8)
    biased = Router(1, "sigmoid", torch.tensor([0.0, 0, 0, 0, 0, 1, 0, 0]))
    grouped = Router(2, num_expert_group=2, topk_group=1)
    assert select(case_logits, build_plan("vanilla"), biased).topk_ids.tolist() == [[5]]
    logits = torch.tensor([[3.0, 0, 0, 0, 2, 2, 0, 0]])
    assert select(logits, build_plan("vanilla"), grouped).topk_ids.tolist() == [[0, 1]]
