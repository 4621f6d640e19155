"""One launch gives triton_kernels' matmul the arrays that a transcription in loops gives it."""

import dataclasses

import pytest
import torch

from selection.compared import DEVICE, HAS_GPU
from selection.hopper import measure
from selection.routing import CASES, draw_routing, reference, route_as_upstream, run_layer
from selection.variants import compiling
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
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
    found = measure(*compiled.kernels.values())
    assert found.stack == 0, found
    assert found.instructions <= 1400, found


def draw_layer(rows, experts, tied, dtype):
    """Return logits [rows, experts] of `dtype`, hidden [rows, 8], and experts [experts, 8, 6]."""
    draw = torch.Generator().manual_seed(rows * experts)
    logits = torch.randn(rows, experts, generator=draw)
    logits = logits.round() if tied else logits
    return logits.to(dtype), torch.randn(rows, 8, generator=draw), torch.randn(experts, 8, 6, generator=draw)


def choose(run, logits, plan, renumber=False):
    """Return the fields of the launch that `run_layer` reads, of 4 experts a row by a plan, with no slot left empty."""
    out = select(logits, build_plan("xshare", **plan), Router(4), Batch(), slots=RunnerSlots())
    ids, weights = out.topk_ids.to(DEVICE), out.topk_weights.to(DEVICE)
    found = run(build_routing, ids, weights, logits.shape[1], logits.dtype, renumber)
    return {name: getattr(found, name).cpu() for name in ("histogram", "by_expert", "rows", "gates")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rows", "experts"), [(2, 32), (16, 128)])
def test_a_plan_that_drops_nothing_gives_upstreams_arrays(run, rows, experts, tied, dtype):
    """Both numberings equal upstream's, and its layer adds the same terms by either."""
    logits, hidden, weights = draw_layer(rows, experts, tied, dtype)
    gate_error = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    layers = []
    for by_expert in (False, True):
        expected, found = route_as_upstream(logits, 4, by_expert), choose(run, logits, {"k0": 4}, by_expert)
        for name in ("histogram", "by_expert", "rows"):
            assert torch.equal(found[name], expected[name]), name
        torch.testing.assert_close(found["gates"], expected["gates"], **gate_error)
        layers += [run_layer(**found, hidden=hidden, experts=weights)]
        layers += [run_layer(**expected, hidden=hidden, experts=weights)]
    error = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-5}
    for layer in layers[1:]:
        torch.testing.assert_close(layer, layers[0], **error)
    torch.testing.assert_close(layers[0], layers[2], rtol=1e-5, atol=1e-5)  # the numbering alone


@pytest.mark.parametrize("plan", [{"k0": 0, "add": 2}, {"k0": 0, "add": 12}, {"k0": 1, "add": 0}])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_plan_that_drops_experts_gives_the_layer_of_masked_logits(run, rows, tied, plan):
    """A row's gates are the softmax of the logits that it keeps; filled slots weigh 0, as upstream's masked ones do."""
    logits, hidden, weights = draw_layer(rows, 32, tied, torch.float32)
    out = select(logits, build_plan("xshare", **plan), Router(4), Batch(), slots=RunnerSlots(empty=True))
    kept = torch.zeros(rows, 33, dtype=torch.bool)
    kept = kept.scatter_(1, out.topk_ids.long() % 33, True)[:, :32]  # the remainder of -1 is 32
    gates = logits.masked_fill(~kept, -torch.inf).softmax(1)
    dense = torch.einsum("re,rd,edo->ro", gates, hidden, weights)
    found = run_layer(**choose(run, logits, plan), hidden=hidden, experts=weights)
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-5)
    masked = select(logits, build_plan("xshare", **plan), Router(4), Batch(), slots=RunnerSlots(masked=True))
    upstream = route_as_upstream(masked.masked_logits, 4, by_expert=False)
    torch.testing.assert_close(found, run_layer(**upstream, hidden=hidden, experts=weights), rtol=1e-4, atol=1e-5)
