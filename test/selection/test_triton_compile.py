"""The Triton kernel compiles for Hopper, on machines without one: the compiler may refuse what the interpreter runs.

And it becomes what the kernel is written for: rows that stay in their warp.
"""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_xshare import Batch, Router, RunnerSlots, build_plan
from sglang_xshare.selection.triton_kernel.kernel import select_kernel
from sglang_xshare.selection.triton_kernel.mask import mask_kernel
from sglang_xshare.selection.triton_kernel.recipe import make_recipe
from sglang_xshare.selection.triton_kernel.slots import finish_slots
from sglang_xshare.selection.triton_kernel.tile import WARPS, make_tile

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
SIGNATURE = {
    "valid": "*i1",
    "bias": "*fp32",
    "ranks": "*i64",
    "budgets": "*i64",
    "partials": "*i64",
    "arrivals": "*i32",
    "topk_ids": "*i32",
    "topk_weights": "*fp32",
    "selected": "*i1",
    "selected_out": "*i1",
    "active": "*i1",
    "vanilla_active": "*i1",
    "kept_mass": "*fp32",
    "rescued": "*i64",
    "sorted_slots": "*i32",
    "block_experts": "*i32",
    "num_sorted": "*i32",
    "num_rows": "i32",
    "row_stride": "i32",
    "num_blocks": "i32",
}
ALIGNMENT = ("sorted_slots", "block_experts", "num_sorted")
FILLED = RunnerSlots()
BIAS = torch.zeros(256)
CASES = {
    "xshare": ({"policy": "xshare"}, Router(8), 1, (16, 128)),
    "xshare in programs": ({"policy": "xshare"}, Router(8), 1, (64, 256)),
    "xshare per request": ({"policy": "xshare", "add_per_request": 4}, Router(8), 4, (16, 128)),
    "xshare by mass": ({"policy": "xshare", "p": 0.5, "k0": 2, "mass": 0.5}, Router(8, "sigmoid"), 1, (16, 128)),
    "xshare by rank": ({"policy": "xshare", "target_per_rank": 5}, Router(8), 1, (16, 128)),
    "xshare by filled rank": ({"policy": "xshare", "target_per_rank": 5, "balance": "fill"}, Router(8), 1, (64, 256)),
    "oea": ({"policy": "oea", "kmax": 10, "max_rank": 12}, Router(8, renormalize=False), 1, (16, 128)),
    "lynx-lat": ({"policy": "lynx-lat", "drop": 8}, Router(8), 1, (16, 128)),
    "lynx-acc": ({"policy": "lynx-acc", "confidence": 0.5}, Router(8), 1, (64, 128)),
    "moe-spec truncating": ({"policy": "moe-spec", "budget": 16, "coverage": "truncate"}, Router(8), 1, (64, 128)),
    "dynamic-skip": ({"policy": "dynamic-skip", "beta": 0.5}, Router(8), 1, (8, 64)),
    "group-limited": (
        {"policy": "xshare"},
        Router(8, "sigmoid", BIAS, num_expert_group=8, topk_group=4),
        1,
        (16, 256),
    ),
}


def compile_kernel(case, dtype=torch.float32, votes=True, routes=True, slots=FILLED, kernel=select_kernel):
    """The kernel compiled for Hopper, as it would be launched for a case."""
    keys, router, tokens, (rows, experts) = CASES[case]
    plan, batch = build_plan(keys), Batch(tokens_per_request=tokens)
    block_size = slots.block_size or 0 if slots else 0
    recipe = make_recipe(plan, router, batch, torch.empty(rows, experts, dtype=dtype), slots, block_size)
    tile = make_tile(plan, router, batch, rows, experts, block_size, recipe.shared)
    constants = {"recipe": recipe, "tile": tile, "votes": votes, "routes": routes}
    if slots is None or not slots.masked:
        constants["masked"] = None
    if not block_size:
        constants |= dict.fromkeys(ALIGNMENT)
    if router.correction_bias is None:
        constants["bias"] = None
    if plan.target_per_rank is None:
        constants["ranks"] = None
    if not tile.several:
        constants |= {"partials": None, "arrivals": None}
    signature = {"logits": DTYPES[dtype], "masked": DTYPES[dtype]} | SIGNATURE | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    signature = {name: signature[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items() if k in names})
    return triton.compile(source, target=HOPPER, options={"num_warps": WARPS, "enable_fp_fusion": True})


@pytest.mark.parametrize("case", CASES)
def test_one_launch(case):
    compile_kernel(case)


def test_slots_left_empty():
    compile_kernel("xshare", slots=None)


@pytest.mark.parametrize("case", ["xshare", "xshare in programs", "oea"])
def test_sorted_slots(case):
    compile_kernel(case, slots=RunnerSlots(16))


@pytest.mark.parametrize("case", ["group-limited", "xshare in programs"])
def test_a_shared_experts_column(case):
    compile_kernel(case, slots=RunnerSlots(shared=1, shared_weight=0.4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["xshare", "xshare in programs"])
def test_masked_logits_in_the_same_launch(case, dtype):
    compile_kernel(case, dtype, slots=RunnerSlots(masked=True))


def test_the_barriers_order_memory():
    """Their atomics stand between barriers of the program's own threads, whose stores they release: the votes' barrier,
    the one that a batch without a known awake expert takes, and the count of those that are done.
    """
    code = compile_kernel("xshare in programs", slots=RunnerSlots(16)).asm["ptx"]
    order = re.findall(r"bar\.sync|(?:atom|ld)\.global\.gpu\.(release|acquire|acq_rel)", code)
    assert [name for name in order if name] == ["release", "acquire", "release", "acquire", "acq_rel"]
    assert all(order[i - 1] == order[i + 1] == "" for i, name in enumerate(order) if name)


@pytest.mark.parametrize("half", ["votes", "routes"])
def test_two_launches(half):
    compile_kernel("xshare in programs", votes=half == "votes", routes=half == "routes")


@pytest.mark.parametrize("block_size", [None, 16])
def test_a_third_launch_finishes(block_size):
    compile_kernel("xshare in programs", slots=RunnerSlots(block_size), kernel=finish_slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_logits_in_a_launch_of_their_own(dtype):
    constants = {"num_experts": 128, "width": 128, "columns": 4, "slots": 4, "top_k": 4}
    constants["lowest"] = torch.finfo(dtype).min
    names = mask_kernel.arg_names
    kinds = [DTYPES[dtype], "*i32", "*i1", "*i1", "*i1", DTYPES[dtype], "*i1", "i32"]
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(mask_kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    triton.compile(source, target=HOPPER, options={"num_warps": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["xshare", "xshare in programs"])
def test_a_row_stays_in_its_warp(case, dtype):
    """No layout that is reduced along its rows spreads one over several warps: a round would wait for the others."""
    code = compile_kernel(case, dtype).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduced = re.findall(r"}\) : \(tensor<\w+, (#\w+)>\) -> tensor<\w+, #ttg.slice<{dim = 1,", code)
    assert len(reduced) > 4
    for name in set(reduced):
        assert re.search(r"warp = \[(\[\d+, 0\](, )?)+\]|warpsPerCTA = \[8, 1\]", layouts[name]), layouts[name]
