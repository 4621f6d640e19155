"""Pairs sorted by expert: the reference against plain loops, the bound of their blocks, and the kernel's by hand.

The drawn cases of test_backends.py compare the kernel's alignment with the reference.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selection.cases import spell
from selection.compared import DEVICE, OEA, XSHARE, Backend, check_alignment, compare, make_logits
from sglang_xshare import Batch, Router, RunnerSlots
from sglang_xshare.selection.alignment import align_pairs, count_blocks

ALIGNED = RunnerSlots(aligned=True)


def align_by_loops(ids: list[list[int]], block: int) -> tuple[list[int], list[int]]:
    """Return (pairs, experts of the blocks) without what lies behind the total."""
    flat = [expert for row in ids for expert in row]
    pairs: list[int] = []
    experts: list[int] = []
    for expert in sorted(set(flat)):
        pairs += [place for place, one in enumerate(flat) if one == expert]
        while len(pairs) % block:
            pairs.append(len(flat))
        experts += [expert] * (len(pairs) // block - len(experts))
    return pairs, experts


@Backend("reference").settle(60)
@given(data=st.data())
def test_the_reference_sorts_as_plain_loops_do(data):
    """Also -1, which upstream sorts before all experts, and experts that a row has more than once."""
    rows, columns, block = (data.draw(st.integers(1, most)) for most in (20, 9, 17))
    ids = data.draw(st.lists(st.lists(st.integers(-1, 12), min_size=columns, max_size=columns), min_size=rows))
    found = align_pairs(torch.tensor(ids, dtype=torch.int32), block)
    total = int(found.num_tokens_post_padded)
    pairs, experts = align_by_loops(ids, block)
    assert (found.sorted_token_ids[:total].tolist(), found.expert_ids[: total // block].tolist()) == (pairs, experts)
    check_alignment(found, torch.tensor(ids, dtype=torch.int32), block)


@Backend("reference").settle(100)
@given(data=st.data())
def test_no_more_blocks_are_filled_than_counted(data):
    block = data.draw(st.sampled_from([1, 2, 16, 64]))
    pairs = data.draw(st.lists(st.integers(-1, 30), min_size=1, max_size=200))
    most = len(set(pairs)) + data.draw(st.integers(0, 3))
    assert sum(-(-count // block) for count in Counter(pairs).values()) <= count_blocks(most, len(pairs), block)


def test_the_count_of_blocks_is_reached():
    """Every expert but one has one pair, and the last one begins a block with its last."""
    for most, pairs in ((1, 17), (3, 35), (24, 128), (128, 128), (200, 128)):
        sizes = [1] * (min(most, pairs) - 1)
        sizes.append(pairs - len(sizes))
        assert sum(-(-size // 16) for size in sizes) == count_blocks(most, pairs)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_batch_of_padding_rows(kernel, rows):
    """All slots hold expert 0, which takes as many blocks as that needs."""
    batch = Batch(torch.zeros(rows, dtype=torch.bool, device=DEVICE))
    found = compare(kernel, make_logits("normal", rows, 32), spell(OEA), Router(6), batch, slots=ALIGNED)
    assert found.alignment.num_tokens_post_padded.item() == count_blocks(1, 10 * rows) * 16


def test_an_expert_that_fills_many_slots_of_several_rows(kernel):
    """Each row keeps one of two experts and fills seven slots with it: 64 pairs an expert, four blocks."""
    logits = torch.zeros(16, 32, device=DEVICE)
    logits[:8, 3] = logits[8:, 20] = 9
    found = compare(kernel, logits, spell("pruned:k0=1"), Router(8), slots=ALIGNED)
    assert found.alignment.expert_ids[:8].tolist() == [3] * 4 + [20] * 4
    assert found.alignment.num_tokens_post_padded.item() == 128


def test_what_is_not_aligned(kernel):
    """Several programs, more rows or pairs than an int32 has bits for, empty slots, masked logits, no slots, no row."""
    others = [RunnerSlots(empty=True, aligned=True), RunnerSlots(masked=True, aligned=True), RunnerSlots(), None]
    for rows, slots in [(0, ALIGNED), (17, ALIGNED), (33, ALIGNED), *((16, one) for one in others)]:
        assert kernel(make_logits("normal", rows, 32), spell(XSHARE), Router(4), slots=slots).alignment is None
    for columns in (128, 129):
        found = compare(kernel, make_logits("normal", 16, 32), spell(f"oea:kmax={columns}"), Router(4), slots=ALIGNED)
        assert (found.alignment is None) == (columns == 129)
    alignment = kernel(make_logits("normal", 16, 64), spell(XSHARE), Router(4), slots=ALIGNED).alignment
    assert [len(one) for one in alignment] == [16 * 64, 64, 1]
    assert all(one.data_ptr() % 16 == 0 for one in alignment), "another kernel would be compiled for it"
