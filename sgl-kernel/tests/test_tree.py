"""Tests that compare the built trees with trees that the test has grown. The parents in these trees are known."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel
from sgl_kernel.tree import FULL_MASK, QLEN_ONLY

from .draft_trees import DraftTree, grow


@dataclass
class Built:
    """The outputs of `build_tree_kernel_efficient_cpu`."""

    tree_mask: Tensor
    positions: list[int]
    retrieve_index: list[list[int]]
    next_token: list[list[int]]
    next_sibling: list[list[int]]


def build(trees: list[DraftTree], seq_lens: list[int], topk: int, depth: int, nodes: int, mode: int) -> Built:
    batch = len(trees)
    cells = nodes * nodes * batch + (nodes * sum(seq_lens) if mode == FULL_MASK else 0)
    tree_mask = torch.ones(cells, dtype=torch.bool)
    positions = torch.full((batch * nodes,), -9)
    retrieve_index, next_token, next_sibling = torch.full((3, batch, nodes), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([tree.parent_list for tree in trees], dtype=torch.int64).view(batch, -1 if batch else 1),
        torch.tensor([tree.selected for tree in trees], dtype=torch.int64).view(batch, nodes - 1),
        torch.tensor(seq_lens, dtype=torch.int64),
        tree_mask,
        positions,
        retrieve_index,
        next_token,
        next_sibling,
        topk,
        depth,
        nodes,
        mode,
    )
    return Built(tree_mask, positions.tolist(), retrieve_index.tolist(), next_token.tolist(), next_sibling.tolist())


def sees(tree: DraftTree, node: int, other: int) -> bool:
    return other == 0 or other in tree.path_to(node)


@st.composite
def tree_batches(draw: st.DrawFn) -> tuple[list[DraftTree], list[int], int, int, int]:
    topk = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4))
    available = topk + (steps - 1) * topk * topk
    nodes = draw(st.integers(2, min(available, 12) + 1))
    seq_lens = draw(st.lists(st.integers(1, 9), max_size=3))
    rng = random.Random(draw(st.integers(0, 10**6)))
    orphans = draw(st.booleans())
    return [grow(rng, topk, steps, nodes, orphans) for _ in seq_lens], seq_lens, topk, steps, nodes


@settings(max_examples=60, derandomize=True)
@given(tree_batches())
def test_links_positions_and_masks(batch: tuple[list[DraftTree], list[int], int, int, int]) -> None:
    """The links list the children of each node in order. The position of a node is its depth after the sequence.

    The mask of a node marks only the root, its ancestors and itself. A full mask also has columns for the
    sequence before them.
    """
    trees, seq_lens, topk, steps, nodes = batch
    built = build(trees, seq_lens, topk, steps, nodes, QLEN_ONLY)
    for b, tree in enumerate(trees):
        assert built.retrieve_index[b] == list(range(b * nodes, (b + 1) * nodes))
        for node in range(nodes):
            children: list[int] = []
            child = built.next_token[b][node]
            while child != -1 and len(children) < nodes:  # a wrong kernel may link nodes in a circle
                children.append(child)
                child = built.next_sibling[b][child]
            assert children == tree.children[node]
    pairs = list(zip(trees, seq_lens, strict=True))
    assert built.positions == [seq_len + len(tree.path_to(node)) for tree, seq_len in pairs for node in range(nodes)]
    seen = [sees(tree, node, other) for tree in trees for node in range(nodes) for other in range(nodes)]
    assert built.tree_mask.tolist() == seen
    full = [
        column < seq_len or sees(tree, node, column - seq_len)
        for tree, seq_len in pairs
        for node in range(nodes)
        for column in range(seq_len + nodes)
    ]
    assert build(trees, seq_lens, topk, steps, nodes, FULL_MASK).tree_mask.tolist() == full


def test_one_step_may_come_without_parents() -> None:
    single = grow(random.Random(0), topk=3, steps=1, nodes=4)
    for parent_list in (single.parent_list, []):
        tree = DraftTree(parent_list, single.selected, single.parents)
        built = build([tree], [2], topk=3, depth=1, nodes=4, mode=QLEN_ONLY)
        assert built.next_token == [[1, -1, -1, -1]]
        assert built.next_sibling == [[-1, 2, 3, -1]]


def test_a_packed_mask_is_refused() -> None:
    chain = grow(random.Random(0), topk=1, steps=1, nodes=2)
    with pytest.raises(NotImplementedError, match="tree mask mode 2; must be 0 or 1"):
        build([chain], [1], topk=1, depth=1, nodes=2, mode=2)
