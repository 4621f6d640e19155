"""Run in a process of its own: ranks joined by gloo that select from the same logits, and compare checksums."""

import itertools
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.stage.record.agreement import Agreement

STEPS, LAYERS, ROWS, EXPERTS = 3072, 2, 8, 32
INJECTED = 1500
"""The step in which the last rank has another expert."""
PLANS = [
    build_plan("xshare", k0=1, add=6),
    build_plan("xshare", k0=1, mass=0.8, utility="full"),
    build_plan("xshare", k0=0, add=0, add_per_request=2),
    build_plan("xshare", k0=1, target_per_rank=4),
    build_plan("xshare", k0=1, target_per_rank=4, balance="fill"),
    build_plan("lynx-lat", drop=8),
    build_plan("moe-spec", budget=12),
]
ROUTERS = [Router(4), Router(4, scoring="sigmoid", num_expert_group=4, topk_group=2)]
RANK_OF_EXPERT = torch.arange(EXPERTS) // 8
BY_REFERENCE = 64
"""Steps from one that every other rank selects by the reference to the next."""


def gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
    """As `upstream.all_gather`."""
    gathered = own.new_empty(ranks * len(own))
    dist.all_gather_into_tensor(gathered, own)
    return gathered


def run_rank(rank: int, size: int, folder: Path) -> None:
    """Select in every step; leave what was active, and what each comparison has found, with its forward."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=size)
    agreement = Agreement(size, "cpu", gather)
    generator = torch.Generator().manual_seed(0)
    active, seen = [], []
    for step, plan in zip(range(STEPS), itertools.cycle(PLANS)):
        # Coarse values, so that many tie.
        logits = (torch.randn(LAYERS, ROWS, EXPERTS, generator=generator) * 4).round() / 4
        batch = Batch(torch.rand(ROWS, generator=generator) < 0.9)
        backend = "reference" if rank % 2 and step % BY_REFERENCE == 0 else "torch"
        found = [
            select(rows, plan, router, batch, RANK_OF_EXPERT, backend=backend)
            for rows, router in zip(logits, ROUTERS, strict=True)
        ]
        active += [selection.active.clone() for selection in found]
        if step == INJECTED and rank == size - 1:
            found[1].active[int(found[1].active.logical_not().nonzero()[0])] = True
        agreement.count(torch.stack([selection.active for selection in found]))
        before = agreement.counts["comparisons"]
        which = agreement.end_forward(None)
        if agreement.counts["comparisons"] > before:
            seen.append((step + 1, which))
    torch.save({"active": torch.stack(active), "seen": seen, "total": dict(agreement.counts)}, folder / f"{rank}.pt")


def main(size: int, folder: Path) -> None:
    """All ranks; ends with status 1 where one fails."""
    ranks = [multiprocessing.Process(target=run_rank, args=(rank, size, folder)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(int(any(rank.exitcode for rank in ranks)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
