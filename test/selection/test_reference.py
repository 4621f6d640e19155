"""The reference against the papers' algorithms in plain loops: random, tied, padded, tiny, huge and non-finite batches.

Covered: n 1..300, N 8..512, k 1..16, every scoring, bias, group limits and quotas, requests of 1..64 tokens, padding,
exact rows, residents, three dtypes, and each policy's keys over their whole range. The other backends are compared with
the reference in test_backends.py.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selection.cases import SPECIAL, cases, indices, keys_for, run
from selection.oracle import ALGORITHMS
from selection.oracle_case import Case
from sglang_xshare import Batch, Router, build_plan
from sglang_xshare.policies import list_policies
from sglang_xshare.types import SCORINGS

EVERY_POLICY = pytest.mark.parametrize("policy", ALGORITHMS)
few = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LARGE = {"max_requests": 30, "max_experts": 512, "max_tokens": 10}


def check(case, policy, keys):
    """Compare ids, weights, S, active set, counts and kept mass with the algorithm's."""
    own_share = keys.get("own_share", 0)  # how rows are weighed is no part of an algorithm
    expected = ALGORITHMS[policy](case, **{name: value for name, value in keys.items() if name != "own_share"})
    plan = build_plan(policy, **keys)
    columns = plan.kmax or case.top_k
    columns = columns if case.exact is None else max(columns, case.top_k)
    out = run(case, plan, "reference")
    assert (out.topk_ids.dtype, out.topk_weights.dtype) == (torch.int32, torch.float32)
    assert out.topk_ids.tolist() == [row + [-1] * (columns - len(row)) for row in expected.experts]
    assert (indices(out.selected), indices(out.active)) == (expected.selected, set().union(*expected.experts))
    assert indices(out.vanilla_active) == set().union(*(case.top[i] for i in case.rows))
    assert int(out.rescued) == expected.rescued
    for i, experts in enumerate(expected.experts):
        weights = weigh(case, expected, i, own_share)
        if case.expert_scale is not None:
            weights = [w * float(case.expert_scale[j]) for w, j in zip(weights, experts, strict=True)]
        assert out.topk_weights[i].tolist() == [near(one) for one in weights] + [0.0] * (columns - len(weights)), i
        assert float(out.kept_mass[i]) == near(find_kept_mass(case, i, experts)), i


def weigh(case, answer, i, own_share):
    """A row's weights: its scores, over a mean of their sum and that of its own top-k if the model renormalizes.

    The sum is a float32, which has few digits below 1e-38. If it is 0, all experts of both have the same score.
    """
    scores = [case.P[i][j] for j in answer.experts[i]]
    if not case.renormalize:
        return scores
    whole = answer.experts[i] if answer.whole is None else answer.whole[i]
    total = math.pow(sum(case.P[i][j] for j in whole), 1 - own_share)
    total *= math.pow(sum(case.P[i][j] for j in case.top[i]), own_share)
    total = torch.tensor(total, dtype=torch.float32).item()
    if total > 0:
        return [s / total for s in scores]
    return [1 / (len(whole) ** (1 - own_share) * len(case.top[i]) ** own_share) for _ in scores]


def find_kept_mass(case, i, experts):
    if i not in case.rows:
        return 0.0
    own = sum(case.P[i][j] for j in case.top[i])
    kept = sum(case.P[i][j] for j in experts) / own if own > 0 else math.inf
    return kept if kept <= torch.finfo(torch.float32).max else 1.0


def near(value):
    """Equal to 1e-6, in the way of float32 for numbers beyond 1."""
    return pytest.approx(value, abs=1e-6, rel=1e-6)


def test_every_policy_of_a_paper_has_a_transcription():
    assert {policy.name for policy in list_policies()} - {"custom", "observe"} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("examples", "sizes"),
    [
        (50, {}),
        (3, LARGE),
        pytest.param(1000, {"max_experts": 128}, marks=pytest.mark.long),
        pytest.param(60, LARGE | {"max_requests": 4, "max_tokens": 64}, marks=pytest.mark.long),
    ],
    ids=["small", "large", "many small", "many large"],
)
@EVERY_POLICY
def test_batches(policy, examples, sizes):
    @settings(few, max_examples=examples, derandomize=examples <= 50)
    @given(data=st.data())
    def check_drawn(data):
        case = data.draw(cases(**sizes))
        check(case, policy, data.draw(keys_for(policy, case)))

    check_drawn()


@EVERY_POLICY
@settings(few, max_examples=30)
@given(data=st.data())
def test_special_values(policy, data):
    """Every element drawn by itself, so that a failure shrinks to the few that matter."""
    rows = data.draw(st.integers(1, 4))
    values = st.lists(st.sampled_from(SPECIAL), min_size=8, max_size=8)
    router = Router(
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from(SCORINGS)),
        data.draw(st.sampled_from([None, torch.tensor([0.0, 0.5] * 4)])),
        data.draw(st.booleans()),
    )
    batch = Batch(data.draw(st.sampled_from([None, torch.arange(rows) != 1])))
    case = Case(torch.tensor([data.draw(values) for _ in range(rows)]), router, batch, [0, 1, 2, 3] * 2)
    check(case, policy, data.draw(keys_for(policy, case)))
