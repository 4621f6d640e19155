"""Tests that compare the functions for the req_to_token table with loops over single cells."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel

POOL_ROWS, POOL_LEN = 6, 24


@st.composite
def ragged_requests(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw distinct pool rows and a range of positions for each row. A range and the whole batch can be empty."""
    rows = draw(st.lists(st.integers(0, POOL_ROWS - 1), unique=True))
    start = [draw(st.integers(0, POOL_LEN)) for _ in rows]
    end = [draw(st.integers(first, POOL_LEN)) for first in start]
    return rows, start, end


def numbered_table(dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a table whose cells all contain different numbers other than 0."""
    return torch.arange(1, POOL_ROWS * POOL_LEN + 1, dtype=dtype).view(POOL_ROWS, POOL_LEN)


@settings(max_examples=40, derandomize=True)
@given(ragged_requests(), st.sampled_from([torch.int32, torch.int64]))
def test_extend_cache_locs_reads_cell_by_cell(
    requests: tuple[list[int], list[int], list[int]], index_dtype: torch.dtype
) -> None:
    rows, start, end = requests
    table = numbered_table()
    expected = [table[r, p].item() for r, s, e in zip(rows, start, end, strict=True) for p in range(s, e)]
    out = torch.full((len(expected) + 3,), -7, dtype=torch.int64)
    indices = [torch.tensor(x, dtype=index_dtype) for x in requests]
    sgl_kernel.assign_extend_cache_locs_cpu(indices[0], table, indices[1], indices[2], out, POOL_LEN)
    assert out.tolist() == [*expected, -7, -7, -7]


@settings(max_examples=40, derandomize=True)
@given(ragged_requests())
def test_req_to_token_pool_writes_cell_by_cell(requests: tuple[list[int], list[int], list[int]]) -> None:
    rows, start, end = requests
    table = numbered_table()
    slots = torch.arange(1000, 1000 + sum(end) - sum(start))
    expected = table.tolist()
    slot = iter(slots.tolist())
    for r, s, e in zip(rows, start, end, strict=True):
        for p in range(s, e):
            expected[r][p] = next(slot)
    indices = [torch.tensor(x, dtype=torch.int64) for x in requests]
    sgl_kernel.assign_req_to_token_pool_cpu(indices[0], table, indices[1], indices[2], slots, POOL_LEN)
    assert table.tolist() == expected


@pytest.mark.parametrize("rows", [[], [2], [5, 0, 3]])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (2, 1), (3, 2)])
def test_a_draft_has_the_slots_behind_the_sequence(rows: list[int], topk: int, num_steps: int) -> None:
    """Each branch of a draft has the slots of the prefix and its own slots."""
    table, seq_lens = numbered_table(), [1, 12, 7][: len(rows)]
    out = torch.zeros(len(rows) * topk * num_steps, dtype=torch.int64)
    requests, lengths = torch.tensor(rows, dtype=torch.int64), torch.tensor(seq_lens, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, out, POOL_LEN, topk, num_steps)
    expected = [table[r, s + i].item() for r, s in zip(rows, seq_lens, strict=True) for i in range(topk * num_steps)]
    assert out.tolist() == expected
    branches = sgl_kernel.build_draft_decode_metadata_cpu(table, requests, lengths, topk, num_steps, POOL_LEN)
    assert branches.shape[0] == len(rows) * topk
    assert branches.dtype == table.dtype
    for i, (r, s) in enumerate(zip(rows, seq_lens, strict=True)):
        for branch in range(topk):
            own = range(s + branch * num_steps, s + (branch + 1) * num_steps)
            expected = [table[r, p].item() for p in [*range(s), *own]]
            assert branches[i * topk + branch, : s + num_steps].tolist() == expected
