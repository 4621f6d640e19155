"""A backend beside the reference. The Triton kernel is compiled if there is a GPU, and interpreted otherwise."""

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from selection.cases import fill_logits, words
from selection.compiled import NEEDS_COMPILER
from selection.interpreter import interpreted
from sglang_xshare import Batch, Router, select
from sglang_xshare.selection.alignment import BLOCK, align_pairs
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.types import Alignment

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
HERE = ["reference", "torch", pytest.param("cpu", marks=NEEDS_COMPILER)]
"""Backends that run on a CPU."""
EXACT = ("topk_ids", "selected", "active", "vanilla_active", "rescued")
CLOSE = ("topk_weights", "kept_mass")
XSHARE, VOTERS = "xshare:k0=1,add=24", "lynx-acc:confidence=0.2"
BY_MASS = "xshare:k0=2,p=0.6,mass=0.7,utility=full"
OEA, TRUNCATING = "oea:k0=3,p=0.5,kmax=10,max_rank=12", "moe-spec:budget=6,coverage=truncate"
PLANS = [
    *("vanilla", XSHARE, VOTERS, BY_MASS, OEA, TRUNCATING),
    *words("""
    lynx-acc:confidence=0.9,max_voters=2,min_votes=1 xshare:k0=1,add=9,utility=squared,own_share=0.75
    xshare:k0=1,add_per_request=4 xshare:k0=1,mass=0.9,max_add=7 xshare:k0=1,target_per_rank=5
    xshare:k0=1,target_per_rank=5,balance=fill xshare:k0=1,add=5,add_per_request=1,acceptance=0.7,warm_rows=2
    oea:k0=2,target_per_rank=1 lynx-lat:retain=24 lynx-lat:drop=20 moe-spec:budget=20
    moe-spec:budget=12,utility=squared,own_share=0.75 dynamic-skip:beta=0.4
    """),
]
"""Each step of the algebra."""


class Backend:
    """`select` by one backend, in the process in which the backend runs."""

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.device = DEVICE if name == "triton" else "cpu"
        self._call = call or (lambda function, *args, **keys: function(*args, **keys))

    def __call__(self, *args, **keys):
        return self._call(select, *args, backend=self.name, **keys)

    def settle(self, examples):
        """Settings for deterministic examples; an eighth of them for the kernel, of which a GPU compiles each."""
        if self.name == "triton":
            # A P one bit off, from another exp, may one day fall on the other side of a rounding.
            examples = 2 if HAS_GPU else max(examples // 8, 1)
        return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

    def place(self, case):
        """(logits, router, batch, ranks) of a drawn case on the backend's device."""
        logits = without_denormals(case.logits.float()).to(self.device, case.logits.dtype)
        router, batch = move(case.router, self.device), move(case.batch, self.device)
        return logits, router, batch, torch.tensor(case.rank_of_expert, device=self.device)

    def serves(self, logits, plan, router, batch):
        return self.name != "triton" or supports(plan, router, batch, *logits.shape)


@contextmanager
def running():
    """Yield a function that calls another where Triton runs: here with a GPU, else in an interpreter's process."""
    if HAS_GPU:
        yield lambda function, *args, **keys: function(*args, **keys)
        return
    with interpreted() as call:
        yield call


def make_routers(experts, top_k=8, device=DEVICE):
    """A router of each kind, by name."""
    bias = torch.linspace(-0.2, 0.2, experts, device=device).mul(64).round() / 64
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
    }


def move(owner, device):
    """A router or batch with all its tensors on the device."""
    tensors = {name: one for name, one in vars(owner).items() if isinstance(one, torch.Tensor)}
    return dataclasses.replace(owner, **{name: one.to(device) for name, one in tensors.items()})


def make_logits(kind, rows, experts, seed=0, dtype=torch.float32, device=DEVICE):
    return without_denormals(fill_logits(kind, rows, experts, seed)).to(device, dtype)


def make_ranks(logits):
    """[experts]: on four ranks, in contiguous blocks."""
    return torch.arange(logits.shape[1], device=logits.device) * 4 // logits.shape[1]


def without_denormals(logits):
    """Triton's exp flushes what is below 2^-126, torch's does not: let no softmax come out there."""
    gap = logits.masked_fill(~logits.isfinite(), -torch.inf).amax(1, keepdim=True) - logits
    return torch.where((gap > 80) & (gap < 120), logits - 1e3, logits)


def compare(backend, logits, plan, router, batch=None, ranks=None, slots=None):
    """Return the backend's answer, which is the reference's: ids and sets equal, weights close.

    The compiled call's has every bit of torch's. Experts lie on four ranks unless `ranks` are given.
    """
    given = logits.clone()
    call = logits, plan, router, batch or Batch(), make_ranks(logits) if ranks is None else ranks
    expected, found = select(*call, backend="reference", slots=slots), backend(*call, slots=slots)
    check_same(found, expected)
    if found.alignment is not None:
        check_alignment(found.alignment, found.topk_ids)
    if backend.name == "cpu":
        same = select(*call, backend="torch", slots=slots)
        for name in EXACT + CLOSE:
            one, other = getattr(found, name), getattr(same, name)
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name
    assert torch.equal(logits.nan_to_num(), given.nan_to_num())
    return found


def check_same(found, expected, atol=1e-6, rtol=2e-6):
    """Compare what an answer chooses, and what is counted of it."""
    for name in EXACT:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in CLOSE:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=atol, rtol=rtol)
    if expected.masked_logits is not None:
        assert found.masked_logits.dtype == expected.masked_logits.dtype
        assert torch.equal(found.masked_logits, expected.masked_logits)


def check_alignment(alignment: Alignment, ids: torch.Tensor, block_size: int = BLOCK) -> None:
    """Compare an alignment of `ids` [n, columns] with the reference's. The order of an expert's pairs is free."""
    expected = align_pairs(ids, block_size)
    total = int(expected.num_tokens_post_padded)
    assert {one.dtype for one in alignment} == {torch.int32}
    assert alignment.num_tokens_post_padded.tolist() == [total]
    experts = alignment.expert_ids[: total // block_size]
    assert torch.equal(experts, expected.expert_ids[: total // block_size])
    whose = experts.repeat_interleave(block_size).long() * (ids.numel() + 1)
    found, wanted = (one.sorted_token_ids[:total] for one in (alignment, expected))
    assert len(found) == total
    assert torch.equal((whose + found).sort().values, (whose + wanted).sort().values)
