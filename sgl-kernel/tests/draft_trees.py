"""Draft trees in plain Python, made as EAGLE makes them: candidates, their parents, with the best ones as nodes."""

import random
from dataclasses import dataclass, field


@dataclass
class DraftTree:
    """The draft tree of one request.

    `parent_list` contains an entry for the root, then the number of each expanded candidate. `selected` contains the
    candidate numbers of the nodes 1, 2, ... `parents` contains the parent of each node. The root and a node whose
    parent was not selected have None.
    """

    parent_list: list[int]
    selected: list[int]
    parents: list[int | None]
    children: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.children = [[c for c, p in enumerate(self.parents) if p == node] for node in range(len(self.parents))]

    def path_to(self, node: int | None) -> list[int]:
        """Return the nodes on the path from `node` up to the root, without the root."""
        return [] if not node else [node, *self.path_to(self.parents[node])]


def grow(rng: random.Random, topk: int, steps: int, nodes: int, orphans: bool = False) -> DraftTree:
    """Grow a tree in `steps` steps. The first step makes `topk` candidates; each later step expands `topk` candidates.

    `nodes` includes the root. A candidate is selected only if its parent is selected, because EAGLE ranks candidates by
    products of probabilities. If `orphans` is True, candidates are selected without this condition.
    """
    candidate_parent: list[int | None] = [None] * topk  # number of the parent candidate; None stands for the root
    parent_list = [-1, *range(topk)]
    frontier = list(range(topk))
    for _ in range(steps - 1):
        made: list[int] = []
        for parent in frontier:
            made += range(len(candidate_parent), len(candidate_parent) + topk)
            candidate_parent += [parent] * topk
        frontier = sorted(rng.sample(made, topk))
        parent_list += frontier
    parent_list = parent_list[:-topk]  # the last step's candidates are not expanded

    selected: list[int] = []
    while len(selected) < nodes - 1:
        allowed = [
            number
            for number, parent in enumerate(candidate_parent)
            if number not in selected and (orphans or parent is None or parent in selected)
        ]
        selected.append(rng.choice(allowed))
    selected.sort()
    node_of = {number: node for node, number in enumerate(selected, start=1)}
    parents: list[int | None] = [None]
    for number in selected:
        above = candidate_parent[number]
        parents.append(0 if above is None else node_of.get(above))
    return DraftTree(parent_list, selected, parents)
