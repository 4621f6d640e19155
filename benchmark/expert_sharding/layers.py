"""An MoE layer on several ranks, with several layouts of the experts.

The layer receives the rows [n, hidden] of this rank and returns the output for the same rows.
"""

from dataclasses import dataclass
from time import thread_time

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm, silu


@dataclass(frozen=True)
class Experts:
    """The weights of several experts.

    `up` [experts, hidden, 2 * width] contains the gate and up projections side by side. `down` [experts, width, hidden]
    contains the down projections.
    """

    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, experts: int, hidden: int, width: int) -> "Experts":
        """Create random weights. Their scale makes the outputs about as large as the inputs."""
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(experts, hidden, 2 * width, generator=generator) / hidden**0.5
        return cls(up, torch.randn(experts, width, hidden, generator=generator) / width**0.5)

    def slice(self, rank: int, ranks: int) -> "Experts":
        """Return a rank's slice of every expert: some columns of gate and up, and the same rows of down."""
        gate, up = (part.chunk(ranks, -1)[rank] for part in self.up.chunk(2, -1))
        return Experts(torch.cat((gate, up), -1), self.down.chunk(ranks, 1)[rank].contiguous())

    def pick(self, rank: int, ranks: int) -> "Experts":
        """Return a rank's share of the experts. Each expert stays whole."""
        return Experts(self.up.chunk(ranks)[rank], self.down.chunk(ranks)[rank])

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute the experts' outputs for rows [m, hidden] that are sorted by expert.

        `counts` [experts] contains the number of rows of each expert.
        """
        ends = counts.cumsum(0).int()
        gate, up = grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        return grouped_mm(silu(gate) * up, self.down, offs=ends)


class Layout:
    """A rank's part of a layer.

    `work` counts the computed rows times the columns of an expert on this rank. `seconds` is the CPU time.
    """

    def __init__(self, experts: Experts, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.experts = self.hold(experts)
        self.begin()

    def begin(self) -> None:
        """Set the counters to 0."""
        self.work, self.seconds = 0, 0.0

    def hold(self, experts: Experts) -> Experts:
        """Return the weights that this rank holds."""
        raise NotImplementedError

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output for rows [n, hidden]. Every rank must have the same number of rows.

        `ids` [n, k] contains the experts of each row, and `weights` [n, k] contains their weights.
        """
        raise NotImplementedError

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Call `Experts.run`, and count its work and its CPU time."""
        began = thread_time()
        out = self.experts.run(rows, counts)
        self.seconds += thread_time() - began
        self.work += len(rows) * self.experts.down.shape[1]
        return out

    def run_held(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the weighted sum of this rank's experts for rows [n, hidden].

        In `ids`, the experts of this rank have the numbers from 0 on. Other ids are ignored.
        """
        top_k, held = ids.shape[1], len(self.experts.up)
        ids = ids.flatten()
        here = ((ids >= 0) & (ids < held)).nonzero().flatten()
        here = here[ids[here].argsort(stable=True)]
        found = self.run(rows[here // top_k], torch.bincount(ids[here], minlength=held))
        return torch.zeros_like(rows).index_add_(0, here // top_k, found * weights.flatten()[here, None])


class Shard(Layout):
    """The layout of MoEShard. Each rank has a slice of every expert and receives all rows. The results are summed."""

    def hold(self, experts: Experts) -> Experts:
        return experts.slice(self.rank, self.ranks)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gathered = [gather(part, self.ranks) for part in (rows, ids, weights)]
        return scatter_sum(self.run_held(*gathered), self.ranks)


class Whole(Layout):
    """The layout of SGLang's expert parallelism without an all-to-all backend.

    Each rank has whole experts. The collectives are the same as in `Shard`.
    """

    def hold(self, experts: Experts) -> Experts:
        return experts.pick(self.rank, self.ranks)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gathered, ids, weights = (gather(part, self.ranks) for part in (rows, ids, weights))
        return scatter_sum(self.run_held(gathered, ids - self.rank * len(self.experts.up), weights), self.ranks)


class AllToAll(Whole):
    """The expert parallelism of the paper's baseline, except that no row is dropped.

    Each row is sent to the ranks of its experts, and the results are sent back.
    """

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        top_k, held = ids.shape[1], len(self.experts.up)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        sent = torch.bincount(flat, minlength=self.ranks * held).view(self.ranks, held)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = rows.new_empty(sum(here), rows.shape[1])
        dist.all_to_all_single(arrived, rows[order // top_k], here, there)
        # The received rows are sorted by rank, and within each rank by expert.
        local = torch.arange(held).repeat(self.ranks).repeat_interleave(received.flatten()).argsort(stable=True)
        done = torch.empty_like(arrived)
        done[local] = self.run(arrived[local], received.sum(0))
        back = rows.new_empty(len(order), rows.shape[1])
        dist.all_to_all_single(back, done, there, here)
        return torch.zeros_like(rows).index_add_(0, order // top_k, back * weights.flatten()[order, None])


LAYOUTS = {"shard": Shard, "ep": Whole, "ep, all-to-all": AllToAll}


def gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
    """Gather the tensors [n, ...] of all ranks into one tensor [ranks * n, ...]."""
    gathered = own.new_empty(ranks * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own.contiguous())
    return gathered


def scatter_sum(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Sum the tensors [ranks * n, ...] of all ranks, and return this rank's part [n, ...] of the sum."""
    out = parts.new_empty(len(parts) // ranks, *parts.shape[1:])
    dist.reduce_scatter_tensor(out, parts)
    return out


def run_alone(experts: Experts, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the layer's output as a single rank with all experts computes it."""
    return Whole(experts, 0, 1).run_held(rows, ids, weights)
