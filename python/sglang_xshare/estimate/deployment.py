"""What the rank that a step waits for has to do, by how many ranks run a model together and where its experts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .machine import Work

if TYPE_CHECKING:
    from .weights import Weights

PLACEMENTS = ("ep", "shard")
ATTENTIONS = ("data", "tensor")
SENT_BYTES = 2
"""Of a number that ranks exchange: rows are in 16 bits."""
DISPATCHED_BYTES = 1
"""Of a number of a row that goes to its experts' ranks: fp8, as DeepEP sends it. It comes back in 16 bits."""


@dataclass(frozen=True)
class Deployment:
    """`ranks` that run one copy of a model, up to `node` of them in one node.

    `placement`: "ep", experts whole, as many a rank, or "shard", a slice of each. `all_to_all`: rows go to their
    experts' ranks and back; else every rank gets all rows, and sums are scattered. `attention`: "data", each rank
    attends to rows of its own with all weights, or "tensor", to all rows with a share of them.
    """

    ranks: int = 1
    node: int = 8
    placement: str = "ep"
    all_to_all: bool = False
    attention: str = "data"

    def __post_init__(self) -> None:
        for name in ("ranks", "node"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: allowed is a whole number above 0")
        if self.ranks > self.node and self.ranks % self.node:
            raise ValueError(f"--ranks {self.ranks}: allowed is at most --node {self.node}, or a multiple of it")
        if self.all_to_all and self.placement == "shard":
            raise ValueError("--all-to-all with --placement shard: each rank needs every row; allowed is ep")

    @property
    def in_node(self) -> int:
        """Ranks of a node that take part."""
        return min(self.ranks, self.node)


@dataclass(frozen=True)
class Requests:
    """That decode together, on all ranks: how many, the cached tokens of each, and its rows in a step."""

    count: int
    context: int = 0
    tokens: int = 1

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.count * self.tokens


@dataclass(frozen=True)
class Load:
    """Of one MoE layer and step: `active` experts, those of the rank that has most of them, `fullest`, and the slots of
    rows in experts of the rank that has most of these.
    """

    active: float
    fullest: float
    slots: float


def layer_work(weights: Weights, deployment: Deployment, load: Load, requests: Requests) -> Work:
    """Of one MoE layer, with the exchanges that it needs."""
    ranks, rows = deployment.ranks, requests.rows
    shard = deployment.placement == "shard"
    operations = 2 * 8 * weights.expert / weights.bits
    top_k = weights.model.top_k
    slots = rows * top_k / ranks if shard else load.slots
    read = (load.active / ranks if shard else load.fullest) * weights.expert
    work = Work(layers=1, read=read, flops=slots * operations)
    if ranks == 1:
        return work
    if deployment.all_to_all:
        # A request is whole on a rank of data-parallel attention; tensor-parallel ranks divide the rows.
        own = -(-requests.count // ranks) * requests.tokens if deployment.attention == "data" else -(-rows // ranks)
        sent = own * top_k * weights.hidden * (DISPATCHED_BYTES + SENT_BYTES)
        return work + exchange(deployment, 2, sent)
    return work + exchange_all(deployment, rows * weights.hidden * SENT_BYTES)


def rest_work(weights: Weights, deployment: Deployment, requests: Requests) -> Work:
    """Of all else in a step: other weights, KV cache, and the exchanges of tensor-parallel attention."""
    ranks = deployment.ranks
    tensor = deployment.attention == "tensor"
    if tensor:  # ranks beyond the heads that are cached hold copies
        dense, cached = weights.dense / ranks, requests.count / min(ranks, weights.cached_heads)
    else:  # each holds its own requests' cache, and the step waits for the rank with most of them
        dense, cached = weights.dense, -(-requests.count // ranks)
    work = Work(read=dense + weights.cache * requests.context * cached)
    if tensor and ranks > 1:
        work += exchange_all(deployment, requests.rows * weights.hidden * SENT_BYTES) * weights.model.num_layers
    return work


def exchange(deployment: Deployment, count: int, sent: float) -> Work:
    """`count` exchanges in which a rank sends `sent` bytes in all, as much to each rank, itself included."""
    ranks, in_node = deployment.ranks, deployment.in_node
    near, far = sent * (in_node - 1) / ranks, sent * (ranks - in_node) / ranks
    if ranks == in_node:
        return Work(near=count, near_bytes=near)
    return Work(far=count, near_bytes=near, far_bytes=far)


def exchange_all(deployment: Deployment, size: float) -> Work:
    """Every rank gets all `size` bytes, and its share of their sum over the ranks: first among the nodes, each rank for
    its share of its node, then in the node, and the other way round.
    """
    ranks, in_node = deployment.ranks, deployment.in_node
    nodes = ranks // in_node
    near = 2 * size * (in_node - 1) / in_node
    if nodes == 1:
        return Work(near=2, near_bytes=near)
    return Work(far=2, near_bytes=near, far_bytes=2 * size / in_node * (nodes - 1) / nodes)


def held_bytes(weights: Weights, deployment: Deployment) -> float:
    """Bytes of weights that a rank holds."""
    experts = weights.moe_layers * weights.model.num_experts * weights.expert / deployment.ranks
    return experts + weights.dense / (deployment.ranks if deployment.attention == "tensor" else 1)
