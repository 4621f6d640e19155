"""Ranks that run the same encoder with each layout in turn. Each rank has its own core, and gloo connects the ranks."""

import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from benchmark.common.record import Record
from benchmark.common.sweep import fill
from benchmark.expert_sharding.layers import LAYOUTS, Experts, Layout, run_alone

HEADS = 4
ALIGNED = 4
"""The number of float32 values in 16 bytes. In a grouped product, the length of a matrix row must be a multiple."""
COUNTS = {
    "ranks": (2, "ranks"),
    "rounds": (5, "rounds, in which the layouts take turns"),
    "layers": (2, "layers of the encoder"),
    "sequence": (120, "rows of a sequence"),
    "hidden": (256, "width of a row"),
    "width": (1024, "width of an expert, in MoEShard four times that of a row"),
    "top_k": (1, "experts of a row"),
}


@dataclass(frozen=True)
class Router:
    """A random router, in which each row draws `top_k` different experts.

    `odds` [experts] contains the relative probabilities. If `period` is given, the routing repeats: seeds with the same
    remainder modulo `period` give the same routing.
    """

    odds: torch.Tensor
    top_k: int = 1
    period: int | None = None

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert ids [rows, k] int64 and their weights [rows, k] float32. All weights are equal to 1 / k."""
        generator = torch.Generator().manual_seed(seed % self.period if self.period else seed)
        ids = torch.multinomial(self.odds.expand(rows, -1), self.top_k, generator=generator)
        return ids, torch.full((rows, self.top_k), 1 / self.top_k)


def skew(experts: int, skewed: int, alpha: float) -> torch.Tensor:
    """Return the odds [experts] of MoEShard's router. The odds are 1 / experts, plus `alpha` for the skewed experts.

    The first `skewed` experts are the skewed ones.
    """
    odds = torch.full((experts,), 1 / experts)
    odds[:skewed] += alpha
    return odds


def activate(experts: int, active: int, spread: bool) -> torch.Tensor:
    """Return the odds [experts] of a router that uses only `active` experts.

    If `spread` is true, these experts are spread evenly over all ranks. Otherwise, they are the first experts.
    """
    odds = torch.zeros(experts)
    odds[torch.arange(active) * experts // active if spread else torch.arange(active)] = 1
    return odds


@dataclass(frozen=True)
class Encoder:
    """An encoder of attention layers and MoE layers.

    The batch has `batch` sequences of `sequence` rows each. The sequences are divided among the ranks, and each rank
    computes the attention of its own sequences. All layers share the same weights, which are much larger than the CPU
    caches.
    """

    router: Router
    batch: int
    sequence: int = 120
    layers: int = 2
    hidden: int = 256
    width: int = 1024

    def draw(self, rank: int, ranks: int) -> torch.Tensor:
        """Return a random input for this rank, [sequences, rows, hidden]."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.batch // ranks, self.sequence, self.hidden, generator=generator)

    def attend(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Compute the self-attention of each sequence. `kernel` [hidden, 3 * hidden] contains the weights."""
        parts = (x @ kernel).chunk(3, -1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def route(self, rows: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the expert ids and the weights of all rows, for each layer."""
        return [self.router.route(rows, seed * self.layers + layer) for layer in range(self.layers)]

    def forward(self, x: torch.Tensor, kernel: torch.Tensor, layout: Layout, routes: Sequence[Any]) -> float:
        """Run one pass of the encoder, and return the time of its MoE layers in seconds.

        The time includes the wait for other ranks.
        """
        seconds = 0.0
        for routed in routes:
            x = x + self.attend(x, kernel)
            rows = rms_norm(x, (self.hidden,)).flatten(0, 1)
            began = perf_counter()
            out = layout(rows, *routed)
            seconds += perf_counter() - began
            x = x + out.view_as(x)
        return seconds


def sweep(record: Record, cases: Mapping[str, tuple[Encoder, Mapping[str, Any]]], ranks: int, rounds: int) -> None:
    """Measure all cases that are missing in the record. A point contains the values of its case and the `layouts`."""

    def run(encoder: Encoder, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**values, "layouts": measure(encoder, ranks, rounds)}

    fill(record, {key: partial(run, *case) for key, case in cases.items()})


def measure(encoder: Encoder, ranks: int, rounds: int) -> dict[str, Any]:
    """Measure an encoder on several ranks, and return the results of each layout.

    - `ttft_ms` and `layer_ms`: the time to the first token and the time of an MoE layer, in milliseconds. Both contain
      the time of the slowest rank in every round.
    - `work` and `cpu_ms`: the work and the CPU time of each rank.
    - `dropped`: the number of expert slots that were not computed.
    - `difference`: the largest relative difference from the output of a single rank.

    Raises RuntimeError if a rank fails. Raises ValueError if the ranks do not divide a size evenly.
    """
    experts = len(encoder.router.odds)
    units = {"batch": ranks, "experts": ranks, "width": ranks * ALIGNED, "hidden": ALIGNED}
    for name, unit in units.items():
        value = experts if name == "experts" else getattr(encoder, name)
        if value % unit:
            raise ValueError(f"{name} must be a multiple of {unit} on {ranks} ranks (got {value})")
    weights = Experts.draw(experts, encoder.hidden, encoder.width)  # the forked ranks share this memory
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        arguments = (encoder, weights, ranks, rounds, Path(folder))
        processes = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks must end with status 0 (got {[process.exitcode for process in processes]})")
        by_rank = [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]
    return {name: _combine([rank[name] for rank in by_rank], encoder, rounds) for name in LAYOUTS}


def _combine(by_rank: list[dict[str, Any]], encoder: Encoder, rounds: int) -> dict[str, Any]:
    """Combine the measurements of all ranks for one layout."""
    runs = rounds * encoder.layers
    slots = encoder.batch * encoder.sequence * encoder.router.top_k * runs
    work = [rank["work"] for rank in by_rank]
    slowest = {name: map(max, zip(*(rank[name] for rank in by_rank), strict=True)) for name in ("pass", "moe")}
    return {
        "ttft_ms": [1e3 * seconds for seconds in slowest["pass"]],
        "layer_ms": [1e3 * seconds / encoder.layers for seconds in slowest["moe"]],
        "work": [count // runs for count in work],
        "cpu_ms": [1e3 * rank["seconds"] / runs for rank in by_rank],
        "dropped": slots - sum(work) // encoder.width,
        "difference": max(rank["difference"] for rank in by_rank),
    }


def _run_rank(rank: int, encoder: Encoder, experts: Experts, ranks: int, rounds: int, folder: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch warns that it will rename its collectives
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=ranks)
    x, kernel = encoder.draw(rank, ranks), torch.randn(encoder.hidden, 3 * encoder.hidden) / encoder.hidden**0.5
    layouts = {name: kind(experts, rank, ranks) for name, kind in LAYOUTS.items()}
    found: dict[str, dict[str, Any]] = {name: {"pass": [], "moe": []} for name in LAYOUTS}
    rows, routes = x.flatten(0, 1), encoder.route(x.shape[0] * x.shape[1], rank)
    alone = run_alone(experts, rows, *routes[0])
    for name, layout in layouts.items():
        found[name]["difference"] = float((layout(rows, *routes[0]) - alone).abs().max() / alone.abs().max())
        encoder.forward(x, kernel, layout, routes)
        layout.begin()
    for number in range(rounds):
        routes = encoder.route(len(rows), number * ranks + rank)  # different for each rank, but equal for all layouts
        for name, layout in layouts.items():
            dist.barrier()
            began = perf_counter()
            found[name]["moe"].append(encoder.forward(x, kernel, layout, routes))
            found[name]["pass"].append(perf_counter() - began)
    for name, layout in layouts.items():
        found[name] |= {"work": layout.work, "seconds": layout.seconds}
    torch.save(found, folder / str(rank))
    dist.destroy_process_group()
