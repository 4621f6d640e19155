"""Tests that compare moves of slots in the buffers of all layers with copies of single rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel

SLOTS = 9


@settings(max_examples=40, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), unique_by=lambda move: move[0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_moves_copy_whole_slots_of_every_buffer(moves: list[tuple[int, int]], dtype: torch.dtype) -> None:
    buffers = [torch.randn(SLOTS, 2, 4).to(dtype), torch.randn(SLOTS, 2, 4).to(dtype), torch.randn(SLOTS, 3).to(dtype)]
    expected = [buffer.clone() for buffer in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for target, source in moves:
            after[target] = before[source]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers]),
        torch.tensor([target for target, _ in moves], dtype=torch.int64),
        torch.tensor([source for _, source in moves], dtype=torch.int64),
    )
    assert all(torch.equal(got, want) for got, want in zip(buffers, expected, strict=True))
