"""The Triton kernel compiles for Hopper, on machines without one: the compiler may refuse what the interpreter runs.

And it becomes what the kernel is written for: rows that stay in their warp.
"""

import re

import pytest
import torch

from selection.hopper import DTYPES, Case, compile_kernel
from sglang_xshare import Router, RunnerSlots

BIAS = torch.zeros(256)
CASES = {
    "xshare": Case({"policy": "xshare"}, (16, 128)),
    "xshare in programs": Case({"policy": "xshare"}, (64, 256)),
    "xshare per request": Case({"policy": "xshare", "add_per_request": 4}, (16, 128), tokens_per_request=4),
    "xshare by mass": Case({"policy": "xshare", "p": 0.5, "k0": 2, "mass": 0.5}, (16, 128), Router(8, "sigmoid")),
    "xshare by rank": Case({"policy": "xshare", "target_per_rank": 5}, (16, 128)),
    "oea by level rank": Case({"policy": "oea", "target_per_rank": 1}, (64, 200)),
    "xshare by filled rank": Case({"policy": "xshare", "target_per_rank": 5, "balance": "fill"}, (64, 256)),
    "oea": Case({"policy": "oea", "kmax": 10, "max_rank": 12}, (16, 128), Router(8, renormalize=False)),
    "lynx-lat": Case({"policy": "lynx-lat", "drop": 8}, (16, 128)),
    "lynx-acc": Case({"policy": "lynx-acc", "confidence": 0.5}, (64, 128)),
    "moe-spec truncating": Case({"policy": "moe-spec", "budget": 16, "coverage": "truncate"}, (64, 128)),
    "dynamic-skip": Case({"policy": "dynamic-skip", "beta": 0.5}, (8, 64)),
    "sqrtsoftplus": Case({"policy": "moe-spec", "budget": 16}, (16, 256), Router(8, "sqrtsoftplus", BIAS, scaling=1.5)),
    "top-k of each group, scaled by expert": Case(
        {"policy": "xshare"}, (16, 256), Router(8, quota_groups=8, expert_scale=BIAS)
    ),
    "exact rows": Case({"policy": "xshare", "k0": 1, "mass": 0.5, "utility": "full"}, (16, 128), exact=True),
    "exact rows of requests": Case(
        {"policy": "custom", "k0": 1, "kmax": 4, "add_per_request": 4}, (64, 128), tokens_per_request=4, exact=True
    ),
    "exact rows and level ranks": Case({"policy": "oea", "target_per_rank": 1}, (64, 200), exact=True),
    "exact rows and votes": Case({"policy": "lynx-lat", "drop": 8}, (64, 128), exact=True),
    "exact rows and voters": Case({"policy": "lynx-acc", "confidence": 0.5}, (64, 128), exact=True),
    "drafts by their chance": Case(
        {"policy": "xshare", "k0": 1, "add": 12, "utility": "squared", "acceptance": 0.7, "warm_rows": 4},
        (16, 128),
        tokens_per_request=16,
    ),
    "drafts of requests": Case(
        {"policy": "xshare", "k0": 1, "add_per_request": 4, "utility": "full", "acceptance": 0.7},
        (64, 256),
        Router(8, "sqrtsoftplus"),
        tokens_per_request=8,
    ),
    "residents": Case({"policy": "xshare", "k0": 1, "add": 4}, (16, 128), resident=True),
    "residents of requests and slots": Case(
        {"policy": "xshare", "k0": 1, "add": 4, "add_per_request": 2},
        (64, 128),
        tokens_per_request=4,
        resident=True,
        slots=32,
    ),
    "group-limited": Case(
        {"policy": "xshare"}, (16, 256), Router(8, "sigmoid", BIAS, num_expert_group=8, topk_group=4)
    ),
}


FIRST = ["xshare", "xshare per request", "lynx-acc", "moe-spec truncating", "exact rows and voters", "group-limited"]
FIRST += ["drafts of requests", "residents of requests and slots", "top-k of each group, scaled by expert"]
"""Whose steps, all together, are the kernel's; other cases take its branches in other combinations."""


@pytest.mark.parametrize(
    "case", [case if case in FIRST else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_one_launch(case):
    compile_kernel(CASES[case])


def test_slots_left_empty():
    compile_kernel(CASES["xshare"], slots=None)


@pytest.mark.parametrize("case", ["group-limited", "xshare in programs"])
def test_a_shared_experts_column(case):
    compile_kernel(CASES[case], slots=RunnerSlots(shared=1, shared_weight=0.4))


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("case", ["xshare", "xshare per request", "group-limited", "dynamic-skip"])
def test_an_alignment_in_the_same_launch(case, shared):
    compile_kernel(CASES[case], torch.bfloat16, slots=RunnerSlots(shared=shared, aligned=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["xshare", "xshare in programs"])
def test_masked_logits_in_the_same_launch(case, dtype):
    compile_kernel(CASES[case], dtype, slots=RunnerSlots(masked=True))


def test_the_barriers_order_memory():
    """Their atomics, of votes and unknown fillers, stand between barriers of threads whose stores they release."""
    code = compile_kernel(CASES["xshare in programs"], slots=RunnerSlots()).asm["ptx"]
    order = re.findall(r"bar\.sync|(?:atom|ld)\.global\.gpu\.(release|acquire)", code)
    assert [name for name in order if name] == ["release", "acquire", "release", "acquire"]
    assert all(order[i - 1] == order[i + 1] == "" for i, name in enumerate(order) if name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["xshare", "xshare in programs"])
def test_a_row_stays_in_its_warp(case, dtype):
    """No layout that is reduced along its rows spreads one over several warps: a round would wait for the others."""
    code = compile_kernel(CASES[case], dtype).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduced = re.findall(r"}\) : \(tensor<\w+, (#\w+)>\) -> tensor<\w+, #ttg.slice<{dim = 1,", code)
    assert len(reduced) > 4
    for name in set(reduced):
        assert re.search(r"warp = \[(\[\d+, 0\](, )?)+\]|warpsPerCTA = \[\d+, 1\]", layouts[name]), layouts[name]
