"""Every backend's answer to a case beside the oracle's."""

import math

import pytest
import torch

from selection.cases import indices, run
from selection.oracle import ALGORITHMS
from selection.oracle_case import Answer
from sglang_xshare import build_plan


def check(case, policy, keys, backends=("reference", "torch")):
    """Compare every backend's answer with the oracle's: ids, weights, S, active set, counts, metrics."""
    algorithm = {name: value for name, value in keys.items() if name != "own_share"}  # how rows are weighed
    expected: Answer = ALGORITHMS[policy](case, **algorithm)
    plan = build_plan(policy, **keys)
    columns = plan.kmax or case.top_k
    if case.exact is not None:
        columns = max(columns, case.top_k)
    for backend in backends:
        out = run(case, plan, backend)
        assert out.topk_ids.dtype == torch.int32
        assert out.topk_weights.dtype == torch.float32
        assert out.topk_ids.tolist() == [row + [-1] * (columns - len(row)) for row in expected.experts], backend
        assert indices(out.selected) == expected.selected, backend
        assert indices(out.active) == set().union(*expected.experts), backend
        assert indices(out.vanilla_active) == set().union(*(case.top[i] for i in case.rows)), backend
        assert int(out.rescued) == expected.rescued, backend
        for i, experts in enumerate(expected.experts):
            weights = weigh(case, expected, i, keys.get("own_share", 0))
            if case.expert_scale is not None:
                weights = [w * float(case.expert_scale[j]) for w, j in zip(weights, experts, strict=True)]
            assert out.topk_weights[i].tolist() == pad(weights, columns), (backend, i)
            assert float(out.kept_mass[i]) == near(kept_mass_of(case, i, experts)), (backend, i)


def weigh(case, answer, i, own_share):
    """A row's weights: its scores, where the model renormalizes divided by their sum, or by what lies between this and
    that of its own top-k, as a float32: it has few digits below 1e-38. Where that is 0, all of both have the same
    score.
    """
    experts = answer.experts[i]
    scores = [case.P[i][j] for j in experts]
    if not case.renormalize:
        return scores
    whole = experts if answer.whole is None else answer.whole[i]
    total = math.pow(sum(case.P[i][j] for j in whole), 1 - own_share)
    total *= math.pow(sum(case.P[i][j] for j in case.top[i]), own_share)
    total = torch.tensor(total, dtype=torch.float32).item()
    if total > 0:
        return [s / total for s in scores]
    return [1 / (len(whole) ** (1 - own_share) * len(case.top[i]) ** own_share) for _ in experts]


def kept_mass_of(case, i, experts):
    if i not in case.rows:
        return 0.0
    own = sum(case.P[i][j] for j in case.top[i])
    kept = sum(case.P[i][j] for j in experts) / own if own > 0 else math.inf
    return kept if kept <= torch.finfo(torch.float32).max else 1.0


def pad(weights, columns):
    return [near(weight) for weight in weights] + [0.0] * (columns - len(weights))


def near(value):
    """Equal to 1e-6, in the way of float32 for numbers beyond 1."""
    return pytest.approx(value, abs=1e-6, rel=1e-6)
