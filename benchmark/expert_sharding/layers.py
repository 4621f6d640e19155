"""One MoE layer on several ranks, by the place of its experts: rows [n, hidden] of this rank in, the same rows out."""

from dataclasses import dataclass
from time import thread_time

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm, silu


@dataclass(frozen=True)
class Experts:
    """`up` [experts, hidden, 2 * width] holds gate and up projections side by side, `down` [experts, width, hidden]."""

    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, experts: int, hidden: int, width: int) -> "Experts":
        """Draw weights with which outputs are about as large as inputs."""
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(experts, hidden, 2 * width, generator=generator) / hidden**0.5
        return cls(up, torch.randn(experts, width, hidden, generator=generator) / width**0.5)

    def slice(self, rank: int, ranks: int) -> "Experts":
        """Return a rank's share of every expert: columns of gate and up, rows of down."""
        gate, up = (part.chunk(ranks, -1)[rank] for part in self.up.chunk(2, -1))
        return Experts(torch.cat((gate, up), -1), self.down.chunk(ranks, 1)[rank].contiguous())

    def pick(self, rank: int, ranks: int) -> "Experts":
        """Return a rank's share of whole experts."""
        return Experts(self.up.chunk(ranks)[rank], self.down.chunk(ranks)[rank])

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run rows [m, hidden] that lie expert by expert, `counts` [experts] each: one grouped product up, one down."""
        ends = counts.cumsum(0).int()
        gate, up = grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        return grouped_mm(silu(gate) * up, self.down, offs=ends)


class Layout:
    """A rank's part of a layer. Counts `work`, rows times an expert's held columns, and CPU `seconds`."""

    def __init__(self, experts: Experts, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.experts = self.hold(experts)
        self.begin()

    def begin(self) -> None:
        """Count from 0."""
        self.work, self.seconds = 0, 0.0

    def hold(self, experts: Experts) -> Experts:
        """Return this rank's part of all experts."""
        raise NotImplementedError

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run rows [n, hidden], as many on each rank, through the experts `ids` [n, k], summed by `weights` [n, k]."""
        raise NotImplementedError

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run `Experts.run` and count it."""
        began = thread_time()
        out = self.experts.run(rows, counts)
        self.seconds += thread_time() - began
        self.work += len(rows) * self.experts.down.shape[1]
        return out

    def run_held(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run rows [n, hidden] through their experts on this rank, by numbers from 0; other experts add nothing."""
        top_k, held = ids.shape[1], len(self.experts.up)
        ids = ids.flatten()
        here = ((ids >= 0) & (ids < held)).nonzero().flatten()
        here = here[ids[here].argsort(stable=True)]
        found = self.run(rows[here // top_k], torch.bincount(ids[here], minlength=held))
        return torch.zeros_like(rows).index_add_(0, here // top_k, found * weights.flatten()[here, None])


class Shard(Layout):
    """MoEShard: each rank has a slice of every expert and gets all rows; the partial sums are added up."""

    def hold(self, experts: Experts) -> Experts:
        return experts.slice(self.rank, self.ranks)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gathered = [gather(part, self.ranks) for part in (rows, ids, weights)]
        return scatter_sum(self.run_held(*gathered), self.ranks)


class Whole(Layout):
    """Expert parallelism as SGLang runs it without an all-to-all backend: the same collectives, whole experts."""

    def hold(self, experts: Experts) -> Experts:
        return experts.pick(self.rank, self.ranks)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gathered, ids, weights = (gather(part, self.ranks) for part in (rows, ids, weights))
        return scatter_sum(self.run_held(gathered, ids - self.rank * len(self.experts.up), weights), self.ranks)


class AllToAll(Whole):
    """Expert parallelism as the paper's baseline, without dropping: each row goes to its experts' ranks and back."""

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
        # The rows lie rank by rank, and within a rank expert by expert.
        local = torch.arange(held).repeat(self.ranks).repeat_interleave(received.flatten()).argsort(stable=True)
        done = torch.empty_like(arrived)
        done[local] = self.run(arrived[local], received.sum(0))
        back = rows.new_empty(len(order), rows.shape[1])
        dist.all_to_all_single(back, done, there, here)
        return torch.zeros_like(rows).index_add_(0, order // top_k, back * weights.flatten()[order, None])


LAYOUTS = {"shard": Shard, "ep": Whole, "ep, all-to-all": AllToAll}


def gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
    """Gather [ranks * n, ...] from [n, ...] of each rank."""
    gathered = own.new_empty(ranks * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own.contiguous())
    return gathered


def scatter_sum(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return this rank's part [n, ...] of the sum of [ranks * n, ...] of all."""
    out = parts.new_empty(len(parts) // ranks, *parts.shape[1:])
    dist.reduce_scatter_tensor(out, parts)
    return out


def run_alone(experts: Experts, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the output of one rank with all experts."""
    return Whole(experts, 0, 1).run_held(rows, ids, weights)
