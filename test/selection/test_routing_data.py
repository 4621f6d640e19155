"""One launch gives triton_kernels' matmul the arrays that a transcription in loops gives it.

On a GPU `benchmark.gpu.routing` compares them with those of upstream's own `routing()`.
"""

import dataclasses

import pytest
import torch

from selection.compared import DEVICE, HAS_GPU
from selection.hopper import compiling, measure
from selection.routing import CASES, draw_routing, reference
from sglang_xshare.selection.triton_kernel.routing_data import MAX_PAIRS, SMALL, build_routing, serves


def check(run, ids, weights, experts, renumber=False):
    expected = reference(ids, weights, experts, torch.float32, renumber)
    found = run(build_routing, ids.to(DEVICE), weights.to(DEVICE), experts, torch.float32, renumber)
    assert set(expected) == {field.name for field in dataclasses.fields(found)}
    for name, value in expected.items():
        array = getattr(found, name).cpu()
        assert array.dtype == value.dtype, name
        assert torch.equal(array, value), name
    return found


SHAPES = [(1, 32, 4), (7, 128, 4), (17, 32, 4), (32, 128, 4), (16, 128, 8), (5, 60, 3), (2, 512, 10), (9, 4, 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "experts", "top_k"), SHAPES)
def test_the_arrays_are_those_of_the_transcription(run, case, rows, experts, top_k):
    """Both tiles, filled and not."""
    for renumber in (False, True):
        check(run, *draw_routing(case, rows, experts, top_k), experts, renumber)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_have_the_dtype_of_the_logits(run, dtype):
    """A compiled kernel rounds to the nearest; the interpreter truncates to bfloat16."""
    ids, weights = draw_routing("random", 16, 32, 4)
    found = run(build_routing, ids.to(DEVICE), weights.to(DEVICE), 32, dtype, False).gates.cpu()
    expected = reference(ids, weights, 32, dtype, False)["gates"]
    assert found.dtype == dtype
    assert torch.equal(found, expected) if HAS_GPU else torch.allclose(found, expected, rtol=2**-7)


def test_columns_of_a_wider_tensor(run):
    ids, weights = draw_routing("random", 9, 32, 4)
    wide = torch.cat([ids, ids], 1)[:, :4], torch.cat([weights, weights], 1)[:, :4]
    check(run, *wide, 32)
    check(run, wide[0].masked_fill(torch.arange(9)[:, None] % 3 == 1, -1), wide[1], 32)  # whatever an empty slot weighs


def test_rows_of_the_tables_are_aligned(run):
    """The matmul kernel is compiled for pointers to multiples of 16 bytes, and would be compiled anew for others."""
    found = check(run, *draw_routing("random", 5, 33, 4), 33)
    offsets = [found.starts, *found.block_starts, *found.schedule]
    assert all(array.storage_offset() % 4 == 0 and array.stride(0) == 1 for array in offsets)


def test_what_does_not_fit_is_refused():
    ids = torch.zeros(MAX_PAIRS // 4 + 1, 4, dtype=torch.int32)
    assert serves(MAX_PAIRS // 4, 4)
    assert not serves(*ids.shape)
    assert not serves(0, 4)
    with pytest.raises(ValueError, match=r"1 to 128 elements \(got 132\)"):
        build_routing(ids, ids.float(), 32, torch.bfloat16, False)


@pytest.mark.parametrize("pairs", [SMALL, MAX_PAIRS])
@pytest.mark.parametrize("renumber", [False, True])
def test_compiles_for_hopper(renumber, pairs):
    """The compiler may refuse what the interpreter runs. No register is spilled."""
    with compiling() as compiled:
        ids = torch.zeros(pairs // 4, 4, dtype=torch.int32)
        build_routing(ids, ids.float(), 128, torch.bfloat16, renumber)
    instructions, _, stack = measure(*compiled.kernels.values())
    assert stack == 0
    assert instructions <= 1400
