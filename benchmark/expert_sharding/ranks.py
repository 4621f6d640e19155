"""Ranks on cores of their own, joined by gloo, that run the same encoder under each layout in turn."""

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
"""Numbers that a row of a grouped product's matrices must be a multiple of: 16 bytes."""
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
    """Each row draws `top_k` different experts with these `odds` [experts]. Seeds that `period` divides draw alike."""

    odds: torch.Tensor
    top_k: int = 1
    period: int | None = None

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids [rows, k] int64, weights [rows, k] float32, equal, with sum 1)."""
        generator = torch.Generator().manual_seed(seed % self.period if self.period else seed)
        ids = torch.multinomial(self.odds.expand(rows, -1), self.top_k, generator=generator)
        return ids, torch.full((rows, self.top_k), 1 / self.top_k)


def skew(experts: int, skewed: int, alpha: float) -> torch.Tensor:
    """Return the odds [experts] of MoEShard's router: 1 / experts, and for the first `skewed` experts `alpha` more."""
    odds = torch.full((experts,), 1 / experts)
    odds[:skewed] += alpha
    return odds


def activate(experts: int, active: int, spread: bool) -> torch.Tensor:
    """Return the odds [experts] of `active` experts alone: the first ones, or with `spread` as many of each rank."""
    odds = torch.zeros(experts)
    odds[torch.arange(active) * experts // active if spread else torch.arange(active)] = 1
    return odds


@dataclass(frozen=True)
class Encoder:
    """`batch` sequences of `sequence` rows, divided among the ranks, through `layers` of attention and MoE.

    A rank attends to its own sequences. All layers have the same weights, which are far larger than a cache.
    """

    router: Router
    batch: int
    sequence: int = 120
    layers: int = 2
    hidden: int = 256
    width: int = 1024

    def draw(self, rank: int, ranks: int) -> torch.Tensor:
        """Return this rank's input [sequences, rows, hidden]."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.batch // ranks, self.sequence, self.hidden, generator=generator)

    def attend(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return the self-attention of each sequence; `kernel` is [hidden, 3 * hidden]."""
        parts = (x @ kernel).chunk(3, -1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def route(self, rows: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (ids, weights) of the rows in each layer."""
        return [self.router.route(rows, seed * self.layers + layer) for layer in range(self.layers)]

    def forward(self, x: torch.Tensor, kernel: torch.Tensor, layout: Layout, routes: Sequence[Any]) -> float:
        """Run one pass. Return the seconds of its MoE layers, the wait for other ranks included."""
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
    """Measure the encoders that the record lacks; a point holds the values of its case and the `layouts`."""

    def run(encoder: Encoder, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**values, "layouts": measure(encoder, ranks, rounds)}

    fill(record, {key: partial(run, *case) for key, case in cases.items()})


def measure(encoder: Encoder, ranks: int, rounds: int) -> dict[str, Any]:
    """Return times, work and differences by layout.

    Time to first token and of an MoE layer in every round, in ms, of the slowest rank; each rank's work and CPU time;
    the largest difference to one rank's output; dropped slots. Raises RuntimeError if a rank fails, and ValueError for
    a batch or a width that ranks do not divide.
    """
    experts = len(encoder.router.odds)
    units = {"batch": ranks, "experts": ranks, "width": ranks * ALIGNED, "hidden": ALIGNED}
    for name, unit in units.items():
        value = experts if name == "experts" else getattr(encoder, name)
        if value % unit:
            raise ValueError(f"{name} must be a multiple of {unit} on {ranks} ranks (got {value})")
    weights = Experts.draw(experts, encoder.hidden, encoder.width)  # forked ranks share them
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
    """Return the measurements of all ranks together under one layout."""
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
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
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
        routes = encoder.route(len(rows), number * ranks + rank)  # these differ by rank, not by layout
        for name, layout in layouts.items():
            dist.barrier()
            began = perf_counter()
            found[name]["moe"].append(encoder.forward(x, kernel, layout, routes))
            found[name]["pass"].append(perf_counter() - began)
    for name, layout in layouts.items():
        found[name] |= {"work": layout.work, "seconds": layout.seconds}
    torch.save(found, folder / str(rank))
    dist.destroy_process_group()
