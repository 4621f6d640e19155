"""The `triton_kernel` runner gets the arrays in the fields that each release reads, or upstream's own routing."""

import sys
from dataclasses import dataclass, make_dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from selection.routing import BLOCK_SIZES, draw_routing, reference
from sglang_xshare.selection.triton_kernel import routing_data
from sglang_xshare.selection.triton_kernel.routing_data import RoutingArrays
from sglang_xshare.upstream import triton_kernels

METADATA = {
    **{"slice_sizes": "histogram", "slice_offs": "starts", "block_offs_data": "block_starts"},
    "block_schedule_data": "schedule",
}
"""Fields of the metadata, and the arrays that belong there."""


@dataclass
class Pair:
    """`GatherIndx` and `ScatterIndx` of triton_kernels/matmul_ogs.py in Triton 3.6.0."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass
class RoutingData:
    """The fields of the same file's class that SGLang and the matmul read."""

    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: Any


@pytest.fixture
def install(monkeypatch):
    """Install a stand-in for triton_kernels with these fields of `RaggedTensorMetadata` and these block sizes."""
    import sglang.srt.layers.moe.topk  # which looks for triton_kernels itself, before the stand-in is there

    assert sglang

    def put(fields=tuple(METADATA), sizes=BLOCK_SIZES):
        metadata = make_dataclass("RaggedTensorMetadata", fields)
        metadata.block_sizes = staticmethod(lambda: list(sizes))
        contents = {
            "triton_kernels": {},
            "triton_kernels.tensor_details": {},
            "triton_kernels.tensor_details.ragged_tensor": {"RaggedTensorMetadata": metadata},
            "triton_kernels.matmul_ogs": {"GatherIndx": Pair, "ScatterIndx": Pair, "RoutingData": RoutingData},
        }
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        triton_kernels.read_contract.cache_clear()

    yield put
    triton_kernels.read_contract.cache_clear()


@pytest.fixture
def arrays(monkeypatch):
    """Have the transcription in loops stand in for the launch; return what gives its arrays for one batch."""

    def build(*arguments, **keys):
        return RoutingArrays(**reference(*arguments, **keys))

    monkeypatch.setattr(routing_data, "build_routing", build)
    return partial(build, *draw_routing("random", 5, 32, 4), 32, torch.bfloat16)


def pack():
    contract = triton_kernels.read_contract(BLOCK_SIZES)
    return contract.slots, contract.pack(*draw_routing("random", 5, 32, 4), torch.zeros(5, 32, dtype=torch.bfloat16))


def check_fields(found, arrays, fields=METADATA):
    """Compare what a runner reads with the arrays that belong there."""
    for field, name in fields.items():
        assert torch.equal(getattr(found, field), getattr(arrays, name)), field


@pytest.mark.parametrize("more", [[], [("expected_slice_size", Any, None), ("slice_sizes_divisibility", Any, None)]])
def test_from_0_5_18_on(install, arrays, more):
    """SGLang 0.5.18 to 0.5.23 with triton_kernels of Triton 3.7 or later, whose metadata has two more fields."""
    install([*METADATA, *more])
    slots, found = pack()
    arrays = arrays(renumber=False)  # by descending logit, as the ids are
    assert type(found).__name__ == "TritonKernelTopKOutput"
    check_fields(found.a_ragged_metadata, arrays)
    check_fields(found, arrays, {"gather_indx": "rows", "scatter_indx": "by_expert", "gate_scal": "gates"})
    assert found.n_expts_act == 4
    assert not slots.empty


def test_0_5_17(install, arrays, monkeypatch):
    from collections import namedtuple

    from sglang.srt.layers.moe import topk

    output = namedtuple("TritonKernelTopKOutput", ["routing_data", "gather_indx", "scatter_indx"])
    monkeypatch.setattr(topk, "TritonKernelTopKOutput", output)
    install()
    slots, found = pack()
    arrays = arrays(renumber=True)  # by ascending expert
    check_fields(found.gather_indx, arrays, {"src_indx": "by_expert", "dst_indx": "by_row"})
    check_fields(found.scatter_indx, arrays, {"src_indx": "by_row", "dst_indx": "by_expert"})
    data = found.routing_data
    check_fields(data, arrays, {"gate_scal": "gates", "expt_hist": "histogram"})
    assert (data.n_expts_tot, data.n_expts_act) == (32, 4)
    check_fields(data.expt_data, arrays)
    assert slots.empty


def test_another_contract_keeps_upstreams_routing(install, monkeypatch):
    """AMD's, that of an older triton_kernels, and none."""
    monkeypatch.setitem(sys.modules, "triton_kernels", None)
    triton_kernels.read_contract.cache_clear()
    assert triton_kernels.read_contract(BLOCK_SIZES) is None
    older = ["hist", "token_offs_raw", "token_offs_pad", "block_pid_map"]
    for other in ({"sizes": (*BLOCK_SIZES, 256)}, {"fields": older}):
        install(**other)
        assert (other, triton_kernels.read_contract(BLOCK_SIZES)) == (other, None)


def test_an_unknown_output_of_sglang(install, monkeypatch):
    from sglang.srt.layers.moe import topk

    install()
    monkeypatch.setattr(topk.TritonKernelTopKOutput, "_fields", ("logits",))
    assert triton_kernels.read_contract(BLOCK_SIZES) is None


def test_which_batches(install):
    install()
    for rows, is_cuda in ((32, True), (33, True), (32, False)):
        logits = MagicMock(is_cuda=is_cuda)
        logits.__len__.return_value = rows
        is_found = triton_kernels.find_contract(logits, 4) is not None
        assert (rows, is_cuda, is_found) == (rows, is_cuda, rows == 32 and is_cuda)
