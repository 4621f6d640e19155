"""The tables that the pages show. Each table is made from one or more records."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmark.affinity.report import tabulate_affinity, tabulate_live
from benchmark.balance.live import tabulate_live as tabulate_balance_live
from benchmark.balance.report import tabulate_balance
from benchmark.common.machine import format_machine
from benchmark.common.record import last_session, read_record
from benchmark.common.table import Table
from benchmark.cost.choices import tabulate_choices
from benchmark.cost.report import tabulate_cost
from benchmark.depth.changes import tabulate_changes
from benchmark.depth.report import summarize_depths, tabulate_depths
from benchmark.expert_sharding.report import tabulate_sharding
from benchmark.gpu.server import tabulate as tabulate_gpu
from benchmark.neighbours import tabulate_neighbours
from benchmark.paged.report import tabulate_live as tabulate_paged_live
from benchmark.paged.report import tabulate_paged
from benchmark.quality.defaults import tabulate_defaults, tabulate_named
from benchmark.quality.drafts.report import tabulate_drafts
from benchmark.quality.front.report import tabulate_gains, tabulate_own_share
from benchmark.quality.report import tabulate_quality
from benchmark.quality.samples import tabulate_samples
from benchmark.records.experiments import BUDGETED, EXPERIMENTS, SAMPLED, SIZES, STEPS, VERIFIED
from benchmark.serving.exact import tabulate_exact
from benchmark.serving.report import (
    summarize_serving,
    summarize_verified,
    tabulate_estimate,
    tabulate_serving,
    tabulate_verified,
)
from benchmark.tuning.report import tabulate_tuning

Points = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """The source of a table: the experiments whose records it shows, and the function that makes it."""

    experiments: tuple[str, ...]
    tabulate: Callable[..., Table]
    run: str | None = None
    """The results folder of a GPU run, or None for the records of a CPU."""


H200_RUN = "2026-11-27-nvidia-h200-0.5.23"
FRONTS = ("front", "front-grouped", "front-wide")
WITH_DRAFTS = tuple(f"drafts-{batch}x{tokens}" for batch, tokens in VERIFIED)
DEFAULTS = ("defaults", *(f"defaults-{model}" for model in BUDGETED))
FRESH = tuple(f"fresh-{model}-{sizes}" for model in ("shipped", *STEPS) for sizes in SIZES)
TABLES = {
    "serving": Source(("serving",), tabulate_serving),
    "serving-summary": Source(("serving",), summarize_serving),
    "gpu": Source(("server",), tabulate_gpu, H200_RUN),
    "quality": Source(("quality",), tabulate_quality),
    "verified": Source(WITH_DRAFTS, tabulate_verified),
    "verified-summary": Source(WITH_DRAFTS, summarize_verified),
    "depth": Source(("depth",), tabulate_depths),
    "depth-summary": Source(("depth",), summarize_depths),
    "depth-changes": Source(("depth-changes",), tabulate_changes),
    "drafts": Source(("drafts",), tabulate_drafts),
    "defaults": Source(DEFAULTS, tabulate_defaults),
    "presets": Source(DEFAULTS, tabulate_named),
    "defaults-verified": Source(("defaults-verified",), tabulate_defaults),
    "fresh": Source(FRESH, tabulate_defaults),
    "samples": Source(tuple(one.name for one in SAMPLED), tabulate_samples),
    "front": Source(FRONTS, tabulate_gains),
    "own-share": Source(FRONTS, tabulate_own_share),
    "cost": Source(("cost",), tabulate_cost),
    "exact": Source(("exact",), tabulate_exact),
    "observe": Source(("observe",), tabulate_serving),
    "paged": Source(("paged",), tabulate_paged),
    "paged-live": Source(("paged-live",), tabulate_paged_live),
    "balance": Source(("balance",), tabulate_balance),
    "estimate": Source(("serving",), tabulate_estimate),
    "expert-sharding": Source(("expert-sharding",), tabulate_sharding),
    "affinity": Source(("affinity",), tabulate_affinity),
    "affinity-live": Source(("affinity-live",), tabulate_live),
    "balance-live": Source(("balance-live",), tabulate_balance_live),
    "choices": Source(("serving", "affinity", "affinity-live", "balance-live", "ranks"), tabulate_choices),
    "neighbours": Source(("neighbours",), tabulate_neighbours),
    "tuning": Source(("tuning",), tabulate_tuning),
}


def format_table(name: str, results: Path, page: Path) -> str:
    """Return the Markdown of a table.

    It also contains links to the records and descriptions of the machines. The links are relative to `page`. Raises
    ValueError if a record is missing.
    """
    if name not in TABLES:
        raise ValueError(f"must be one of {', '.join(TABLES)}")
    source = TABLES[name]
    paths = {one: _locate(results, one, source.run) for one in source.experiments}
    records = {one: _read(path, source.run is not None) for one, path in paths.items()}
    try:
        table = source.tabulate(*(record["points"] for record in records.values()))
    except KeyError as error:
        raise ValueError(f"the record must have {error}") from None
    measured = [
        f"[{one}]({os.path.relpath(paths[one], page.parent)}): {format_machine(last_session(record))}."
        for one, record in records.items()
    ]
    return "\n".join([table.to_markdown(), "", *measured])


@cache
def _read(path: Path, is_gpu: bool) -> dict[str, Any]:
    if not path.exists():
        measures = f"make gpu EXPERIMENT={path.stem}" if is_gpu else f"python -m benchmark.records {path.stem}"
        raise ValueError(f"no record {path.name}; {measures} measures it")
    return read_record(path, path.stem)


def _locate(results: Path, name: str, run: str | None) -> Path:
    return EXPERIMENTS[name].path(results) if run is None else results / run / f"{name}.json"
