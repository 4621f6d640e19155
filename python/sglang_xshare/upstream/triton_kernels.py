"""The router's output for the `triton_kernel` MoE runner, built without `routing()`. Its fields differ by release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from ..types import RunnerSlots

if TYPE_CHECKING:
    import torch

    from ..selection.triton_kernel.routing_data import RoutingArrays

METADATA = ["slice_sizes", "slice_offs", "block_offs_data", "block_schedule_data"]
"""The required fields of triton_kernels' `RaggedTensorMetadata`. Fields that 3.7 added have defaults."""
RECORDS = ("routing_data", "gather_indx", "scatter_indx")
TENSORS = ("a_ragged_metadata", "gather_indx", "scatter_indx", "gate_scal", "n_expts_act")
"""The fields of SGLang's `TritonKernelTopKOutput`: RECORDS in 0.5.17, and TENSORS from 0.5.18 to 0.5.23."""
EMPTY, FILLED = RunnerSlots(empty=True), RunnerSlots()


@dataclass(frozen=True)
class Contract:
    """The form of output that a release's runner expects.

    `slots` is an argument of `select()`, and `_pack` builds a `TritonKernelTopKOutput`. `renumber` is an argument of
    `build_routing`. It orders the slots of a row as SGLang does. The runner then adds up a row's experts in the same
    order as after `routing()`. In sglang-kernel 0.4.5 (SGLang 0.5.17), `_topk_forward` of triton_kernels orders the
    slots by ascending expert. In 0.4.6.post1 to 0.4.10 (SGLang 0.5.18 to 0.5.23), it orders them by descending logit,
    as a selection does.
    """

    slots: RunnerSlots
    renumber: bool
    _pack: Callable[[RoutingArrays, int], Any]

    def pack(self, ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> Any:
        """Return the `TritonKernelTopKOutput` of a selection.

        `ids` and `weights` have the shape [n, k]. `logits` [n, N] sets the dtype of the weights.
        """
        from ..selection.triton_kernel.routing_data import build_routing

        return self._pack(build_routing(ids, weights, logits.shape[1], logits.dtype, self.renumber), ids.shape[1])


def find_contract(logits: torch.Tensor, top_k: int) -> Contract | None:
    """Return the runner's contract. Return None if it is unknown, or if the batch is too large for one launch."""
    if not logits.is_cuda:
        return None
    from ..selection.triton_kernel.routing_data import BLOCK_SIZES, serves

    return read_contract(BLOCK_SIZES) if serves(len(logits), top_k) else None


@cache
def read_contract(block_sizes: tuple[int, ...]) -> Contract | None:
    """Return the contract of the installed SGLang and triton_kernels, or None if it is unknown.

    `block_sizes` contains the block sizes for which our arrays have a schedule. On AMD, triton_kernels has five block
    sizes, so the contract is unknown.
    """
    try:
        from triton_kernels.tensor_details.ragged_tensor import RaggedTensorMetadata
    except ImportError:
        return None
    from sglang.srt.layers.moe.topk import TritonKernelTopKOutput

    names = [field.name for field in fields(RaggedTensorMetadata)]
    if names[: len(METADATA)] != METADATA or tuple(RaggedTensorMetadata.block_sizes()) != block_sizes:
        return None
    if TritonKernelTopKOutput._fields == RECORDS:  # 0.5.17: `reduce` masks the slots whose scatter index is -1
        return Contract(EMPTY, True, _pack_records)
    if TritonKernelTopKOutput._fields == TENSORS:  # from 0.5.18 on the runner adds up all slots of a row
        return Contract(FILLED, False, _pack_tensors)
    return None


def _pack_records(arrays: RoutingArrays, top_k: int) -> Any:
    from sglang.srt.layers.moe.topk import TritonKernelTopKOutput
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx

    num_experts = len(arrays.histogram)
    data = RoutingData(arrays.gates, arrays.histogram, num_experts, top_k, _pack_metadata(arrays))
    return TritonKernelTopKOutput(
        data, GatherIndx(arrays.by_expert, arrays.by_row), ScatterIndx(arrays.by_row, arrays.by_expert)
    )


def _pack_tensors(arrays: RoutingArrays, top_k: int) -> Any:
    from sglang.srt.layers.moe.topk import TritonKernelTopKOutput

    return TritonKernelTopKOutput(_pack_metadata(arrays), arrays.rows, arrays.by_expert, arrays.gates, top_k)


def _pack_metadata(arrays: RoutingArrays) -> Any:
    from triton_kernels.tensor_details.ragged_tensor import RaggedTensorMetadata

    return RaggedTensorMetadata(arrays.histogram, arrays.starts, arrays.block_starts, arrays.schedule)
