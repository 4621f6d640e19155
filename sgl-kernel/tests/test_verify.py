"""Tests of greedy verification. A recursive walk over lists of children is the reference; loops check the records."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel

from .draft_trees import DraftTree, grow


def links(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return the first child and the next sibling of each node, or -1 if there is none."""
    next_token, next_sibling = [-1] * len(tree.parents), [-1] * len(tree.parents)
    for node, children in enumerate(tree.children):
        for earlier, later in zip([None, *children], children, strict=False):
            if earlier is None:
                next_token[node] = later
            else:
                next_sibling[earlier] = later
    return next_token, next_sibling


def accepted_path(tree: DraftTree, tokens: list[int], wanted: list[int], node: int, length: int) -> list[int]:
    """Return the accepted nodes from `node` on, at most `length`. The walk enters the first child that matches."""
    matching = [child for child in tree.children[node] if tokens[child] == wanted[node]]
    if length == 1 or not matching:
        return [node]
    return [node, *accepted_path(tree, tokens, wanted, matching[0], length - 1)]


def verify(
    trees: list[DraftTree], tokens: list[list[int]], wanted: list[list[int]], longest: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return accept_index, accept_token_num and predicts as lists. Entries that are not written are -1, -5 and -3."""
    batch, nodes = len(trees), len(tokens[0]) if tokens else 4
    predicts = torch.full((batch * nodes,), -3, dtype=torch.int32)
    accept_index = torch.full((batch, longest), -1, dtype=torch.int32)
    accept_token_num = torch.full((batch,), -5, dtype=torch.int32)
    first, sibling = zip(*map(links, trees), strict=True) if trees else ((), ())
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
        candidates=torch.tensor(tokens).view(batch, nodes),
        retrive_index=torch.arange(batch * nodes).view(batch, nodes),
        retrive_next_token=torch.tensor(first).view(batch, nodes),
        retrive_next_sibling=torch.tensor(sibling).view(batch, nodes),
        target_predict=torch.tensor(wanted).view(batch, nodes),
    )
    return accept_index.tolist(), accept_token_num.tolist(), predicts.tolist()


@settings(max_examples=60, derandomize=True)
@given(
    batch=st.integers(0, 4),
    topk=st.integers(1, 3),
    steps=st.integers(1, 4),
    vocabulary=st.integers(1, 4),  # so small that siblings share a token, and that whole chains are accepted
    longest=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_accepts_the_path_the_target_model_would_have_taken(
    batch: int, topk: int, steps: int, vocabulary: int, longest: int, seed: int
) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(2, min(topk + (steps - 1) * topk * topk, 9) + 1)
    trees = [grow(rng, topk, steps, nodes) for _ in range(batch)]
    tokens, wanted = ([[rng.randrange(vocabulary) for _ in range(nodes)] for _ in range(batch)] for _ in range(2))
    accept_index, accept_token_num, predicts = verify(trees, tokens, wanted, longest)

    expected_predicts = [-3] * (batch * nodes)
    for b in range(batch):
        path = accepted_path(trees[b], tokens[b], wanted[b], 0, longest)
        assert accept_index[b] == [b * nodes + node for node in path] + [-1] * (longest - len(path))
        assert accept_token_num[b] == len(path) - 1
        for node in path:
            expected_predicts[b * nodes + node] = wanted[b][node]
    assert predicts == expected_predicts


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_bonus_token_is_the_last_accepted(batch: int) -> None:
    stride = 4
    accept_tokens = torch.arange(100, 100 + batch * stride, dtype=torch.int32)
    accept_lens = torch.tensor([1 + b % stride for b in range(batch)], dtype=torch.int32)
    bonus = torch.zeros(batch, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus, stride)
    assert bonus.tolist() == [100 + b * stride + b % stride for b in range(batch)]


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(-1, 9), max_size=12))
def test_accepted_slots_are_packed_in_order(accept_index: list[int]) -> None:
    out_cache_loc = torch.arange(50, 60)
    out = torch.zeros(len(accept_index), dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor(accept_index, dtype=torch.int32), out_cache_loc, out)
    packed = [50 + row for row in accept_index if row >= 0]
    assert out.tolist() == packed + [0] * (len(accept_index) - len(packed))


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 5), max_size=4), st.booleans())
def test_rotation_shifts_each_request_left(lengths: list[int], at_first_row: bool) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = list(range(100, 100 + sum(lengths)))
    new = [900 + i for i in range(len(lengths))]
    expected = list(ids)
    for i, first in enumerate(starts):
        last = first + lengths[i] - 1
        if lengths[i]:
            expected[first:last] = ids[first + 1 : last + 1]
            expected[first if at_first_row else last] = new[i]
    input_ids = torch.tensor(ids, dtype=torch.int64)
    start, length, token = (torch.tensor(x, dtype=torch.int64) for x in (starts, lengths, new))
    sgl_kernel.rotate_input_ids_cpu(input_ids, start, length, token, start if at_first_row else None)
    assert input_ids.tolist() == expected
