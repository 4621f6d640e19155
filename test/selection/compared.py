"""The Triton kernel beside the reference: compiled where there is a GPU, elsewhere under Triton's interpreter."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, settings

from selection.cases import fill_logits, router_of
from selection.interpreter import interpreted
from sglang_xshare import Batch, Router, build_plan, select

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
EXACT = ("topk_ids", "selected", "active", "vanilla_active", "rescued")
CLOSE = ("topk_weights", "kept_mass")
PLANS = {
    "vanilla": {},
    "xshare": {"k0": 1, "add": 24},
    "xshare per request": {"policy": "xshare", "k0": 1, "add_per_request": 4},
    "xshare by mass": {"policy": "xshare", "k0": 2, "p": 0.6, "mass": 0.7, "utility": "full"},
    "xshare by capped mass": {"policy": "xshare", "k0": 1, "mass": 0.9, "max_add": 7},
    "xshare by rank": {"policy": "xshare", "k0": 1, "target_per_rank": 5},
    "xshare by filled rank": {"policy": "xshare", "k0": 1, "target_per_rank": 5, "balance": "fill"},
    "oea by level rank": {"policy": "oea", "k0": 2, "target_per_rank": 1},
    "xshare of squares": {"policy": "xshare", "k0": 1, "add": 9, "utility": "squared", "own_share": 0.75},
    "oea": {"k0": 3, "p": 0.5, "kmax": 10, "max_rank": 12},
    "lynx-lat": {"retain": 24},
    "lynx-lat by drop": {"policy": "lynx-lat", "drop": 20},
    "lynx-acc": {"confidence": 0.2},
    "lynx-acc of few voters": {"policy": "lynx-acc", "confidence": 0.9, "max_voters": 2, "min_votes": 1},
    "moe-spec": {"budget": 20},
    "moe-spec of squares": {"policy": "moe-spec", "budget": 12, "utility": "squared", "own_share": 0.75},
    "moe-spec truncating": {"policy": "moe-spec", "budget": 6, "coverage": "truncate"},
    "dynamic-skip": {"beta": 0.4},
}
RESIDENT_PLANS = {
    "add": {"k0": 1, "add": 5},
    "add squares": {"k0": 1, "add": 5, "utility": "squared", "own_share": 0.75},
    "add by request": {"k0": 1, "add": 2, "add_per_request": 2},
    "mass": {"k0": 1, "mass": 0.6, "utility": "full"},
    "ranks": {"k0": 1, "add": 2, "target_per_rank": 4},
    "warm-up": {"k0": 2, "p": 0.7, "max_rank": 12},
    "truncating": {"k0": 0, "add": 6, "coverage": "truncate"},
}
"""Those that take residents: budgets of utility, or none."""
EVERY_PLAN = pytest.mark.parametrize("name", PLANS)
few = settings(
    max_examples=4 if HAS_GPU else 25,  # on a GPU, each of them compiles
    deadline=None,
    # A P one bit off, from another exp, may one day fall on the other side of a rounding: not at random in this run.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@contextmanager
def running():
    """Yield a function that calls another where Triton runs: here with a GPU, else in an interpreter's process."""
    if HAS_GPU:
        yield lambda function, *args, **keys: function(*args, **keys)
        return
    with interpreted() as call:
        yield call


@pytest.fixture(scope="module")
def run():
    """Call a function where Triton runs."""
    with running() as call:
        yield call


@pytest.fixture(scope="module")
def kernel():
    """`select(..., backend="triton")`."""
    with running() as call:
        yield lambda *args, **keys: call(select, *args, backend="triton", **keys)


def make_plan(name):
    return build_plan({"policy": name, **PLANS[name]})


ROUTERS = [
    "softmax",
    "softmax, not renormalizing",
    "softmax with bias",
    "sigmoid",
    "sigmoid with bias",
    "group-limited",
    "group-limited with bias",
    "sqrtsoftplus",
    "sqrtsoftplus with bias",
    "scaled by expert",
    "top-k of each group",
]
"""Kinds that `make_router` makes."""


def make_router(kind, experts, top_k=8):
    bias = torch.linspace(-0.2, 0.2, experts, device=DEVICE).mul(64).round() / 64
    return {
        "softmax": Router(top_k),
        "softmax, not renormalizing": Router(top_k, renormalize=False),
        "softmax with bias": Router(top_k, correction_bias=bias),
        "sigmoid": Router(top_k, "sigmoid"),
        "sigmoid with bias": Router(top_k, "sigmoid", bias, renormalize=False),
        "group-limited": Router(top_k, num_expert_group=8, topk_group=3),
        "group-limited with bias": Router(top_k, "sigmoid", bias, num_expert_group=4, topk_group=2),
        "sqrtsoftplus": Router(top_k, "sqrtsoftplus", renormalize=False),
        "sqrtsoftplus with bias": Router(top_k, "sqrtsoftplus", bias, scaling=1.5),
        "scaled by expert": Router(top_k, expert_scale=4 * bias + 0.5),
        "top-k of each group": Router(top_k, quota_groups=4),
    }[kind]


def move_router(router, device=DEVICE):
    """With all its tensors on the device."""
    tensors = {name: one for name, one in vars(router).items() if isinstance(one, torch.Tensor)}
    return dataclasses.replace(router, **{name: one.to(device) for name, one in tensors.items()})


def on_device(case):
    """(logits, router, batch, ranks) of a drawn case."""
    flags = (None if flag is None else flag.to(DEVICE) for flag in (case.valid, case.exact, case.resident))
    valid, exact, resident = flags
    batch = Batch(valid, case.tokens_per_request, exact, resident, case.slots)
    logits = without_denormals(case.logits.float()).to(DEVICE, case.logits.dtype)
    return logits, move_router(router_of(case)), batch, torch.tensor(case.rank_of_expert, device=DEVICE)


def make_logits(kind, rows, experts, seed=0, dtype=torch.float32):
    return without_denormals(fill_logits(kind, rows, experts, seed)).to(DEVICE, dtype)


def make_ranks(experts):
    """[experts]: on four ranks, in contiguous blocks."""
    return torch.arange(experts, device=DEVICE) * 4 // experts


def without_denormals(logits):
    """Triton's exp flushes what is below 2^-126, torch's does not: let no softmax come out there."""
    gap = logits.masked_fill(~logits.isfinite(), -torch.inf).amax(1, keepdim=True) - logits
    return torch.where((gap > 80) & (gap < 120), logits - 1e3, logits)


def compare(kernel, logits, plan, router, batch=None, ranks=None):
    """The kernel's answer, after comparing it with the reference's. On four ranks, unless it is said otherwise."""
    batch = batch or Batch()
    ranks = make_ranks(logits.shape[1]) if ranks is None else ranks
    expected = select(logits, plan, router, batch, ranks, backend="reference")
    found = kernel(logits, plan, router, batch, ranks)
    for name in EXACT:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in CLOSE:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-6, rtol=2e-6)
    return found
