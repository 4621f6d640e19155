"""The estimate as JSON and as a table, marked as one in its title and in every row."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..policies.schedule import Schedule, build_schedule
from ..policies.spelling import parse_policy
from ..types import Router
from .active import ASSUMPTIONS, MOST_ROWS, Drawn, draw_loads, find_common, read_active
from .deployment import Deployment, Load, Requests, held_bytes
from .latency import FIXED, REACHED, estimate_step
from .machine import Machine
from .weights import Weights, read_weights

FORMULA = (
    f"MoE layer = {FIXED * 1e6:.0f} us + active x expert bytes / ({REACHED:.0%} of bandwidth), step = MoE layers x "
    "that + (all other weights + KV cache) / the same"
)
OF_RANKS = "; ranks: what the one reads that a step waits for, and the exchanges between them"
CAVEATS = (
    "The constants are OEA's fit for one H100; other GPUs differ by bandwidth alone.",
    "Not in it: the selection itself, activations, sampling, the host; no measurement. See docs/estimate.md.",
)
COUNTED = {
    "layers": "MoE layers",
    "read": "bytes read",
    "flops": "operations",
    "near": "exchanges in a node",
    "near_bytes": "bytes sent in it",
    "far": "exchanges between nodes",
    "far_bytes": "bytes sent between them",
}
"""What each constant of a fitted machine is multiplied by."""
FITTED = "The constants are those of --machine. Not in it: the selection itself, activations, sampling, the host."


def estimate(
    arguments: argparse.Namespace, machine: Machine, deployment: Deployment, bandwidth: float | None
) -> dict[str, Any]:
    """The report. `bandwidth` in GB/s, None where the machine was fitted. Raises ValueError in one line."""
    weights = read_weights(arguments.model)
    ranks = deployment.ranks
    whole = deployment.placement == "ep"
    count, parts = weights.model.num_experts, "experts of the model"
    if not whole:
        count, parts = weights.columns, "columns of an expert"
    if count % ranks:
        raise ValueError(f"--ranks {ranks}: allowed is a divisor of the {count} {parts}")
    if ranks > deployment.node and not (machine.far or machine.far_bytes):
        reason = f"--machine {arguments.machine} has no exchange between nodes"
        raise ValueError(f"--ranks {ranks}: {reason}; allowed is at most --node {deployment.node}")
    tokens = arguments.tokens_per_request
    requests = Requests(-(-arguments.batch // arguments.replicas), arguments.context, tokens)
    rows = requests.rows
    schedule = _read_schedule(arguments.policy, weights, rows, tokens, deployment)
    of_fullest = arguments.active is not None and ranks > 1 and whole
    estimates = []
    for source, drawn in _list_loads(arguments, schedule, weights, deployment, rows).items():
        loads = drawn.before, drawn.after
        steps = [estimate_step(machine, weights, deployment, load, requests) for load in loads]
        estimates.append(
            {
                "is_estimate": True,
                "source": source,
                "active_experts": None if of_fullest else [load.active for load in loads],
                "fullest_rank_experts": [load.fullest for load in loads] if whole else None,
                "kept_mass": drawn.kept_mass,
                "moe_layer_us": [step.layer * 1e6 for step in steps],
                "step_ms": [step.step * 1e3 for step in steps],
                "speedup": steps[0].step / steps[1].step,
            }
        )
    return {
        "is_estimate": True,
        "formula": (FORMULA if bandwidth else _spell(machine)) + (OF_RANKS if ranks > 1 else ""),
        "caveats": CAVEATS if bandwidth else (FITTED,),
        "model": {
            "architecture": weights.model.architecture,
            "moe_layers": weights.moe_layers,
            "experts": weights.model.num_experts,
            "top_k": weights.model.top_k,
            "bits_per_expert_weight": weights.bits,
            "expert_bytes": weights.expert,
            "other_bytes": weights.dense,
            "cache_bytes_per_token": weights.cache,
        },
        "policy": {"policy": schedule.policy, "keys": schedule.keys},
        "gpu": arguments.gpu,
        "bandwidth_gb_per_s": bandwidth,
        "machine": asdict(machine),
        "deployment": asdict(deployment) | {"replicas": arguments.replicas},
        "weight_bytes_per_rank": held_bytes(weights, deployment),
        "rows": rows,
        "context": arguments.context,
        "estimates": estimates,
    }


def _spell(machine: Machine) -> str:
    """A fitted machine as the sum that it is, without the terms that take no time."""
    terms = []
    for name, counted in COUNTED.items():
        if seconds := getattr(machine, name):
            unit = "G/s" if name == "flops" else "GB/s"
            is_time = name in ("layers", "near", "far")
            each = f"x {seconds * 1e6:.3g} us" if is_time else f"/ ({1e-9 / seconds:.3g} {unit})"
            terms.append(f"{counted} {each}")
    return f"step = {' + '.join(terms)}"


def _list_loads(
    arguments: argparse.Namespace, schedule: Schedule, weights: Weights, deployment: Deployment, rows: int
) -> dict[str, Drawn]:
    """Active experts before and after, by where they come from."""
    model, ranks = weights.model, deployment.ranks
    if arguments.trace is not None:
        if ranks > 1 and deployment.placement == "ep":
            raise ValueError(
                "--trace with --ranks: it tells no rank's experts; allowed is --active, the fullest rank's"
            )
        before, after, is_policys = read_active(arguments.trace, rows, arguments.policy)
        whose = "" if is_policys else ", as its server's policy kept, whatever --policy says"
        return {f"trace {arguments.trace}{whose}": _give(before, after, rows, weights, ranks)}
    if arguments.active is not None:
        most = model.num_experts // (ranks if deployment.placement == "ep" else 1)
        for count in arguments.active:
            if not 1 <= count <= most:
                whose = "the model's" if most == model.num_experts else "a rank's"
                raise ValueError(f"--active {count:g}: allowed is 1 to {whose} {most} experts")
        before, after = arguments.active
        return {"as given": _give(before, after, rows, weights, ranks)}
    if rows > MOST_ROWS:
        many = f"--batch {arguments.batch}: a step of {rows:,} rows"
        raise ValueError(f"{many}: allowed are at most {MOST_ROWS:,} without --active or --trace")
    found = {}
    for name, common in ASSUMPTIONS.items():
        if arguments.affinity_saves:
            common = find_common(model, rows, arguments.affinity_saves, common)
        found[f"assumed: {name}"] = draw_loads(schedule, model, rows, arguments.tokens_per_request, common, ranks)
    return found


def _give(before: float, after: float, rows: int, weights: Weights, ranks: int) -> Drawn:
    """Experts as somebody knows them; slots lie evenly."""
    slots = rows * weights.model.top_k / ranks
    return Drawn(Load(before, before, slots), Load(after, after, slots), None)


def _read_schedule(text: str, weights: Weights, rows: int, tokens: int, deployment: Deployment) -> Schedule:
    """The policy, spelt as the server takes it. Raises ValueError where it does not run in such a step."""
    ranks = deployment.ranks if deployment.placement == "ep" else 1
    try:
        schedule = build_schedule(*parse_policy(text), tokens > 1, "--tokens-per-request T above 1")
        if schedule is None or schedule.observed:
            raise ValueError("routes as the model does, which the estimate compares with; allowed is another policy")
        for plan in schedule.plans(range(weights.model.num_layers)):
            plan.check(Router(top_k=weights.model.top_k), weights.model.num_experts, ranks)
    except ValueError as error:
        raise ValueError(f"--policy {text}: {error}") from None
    reason = schedule.reason_to_skip("verify" if tokens > 1 else "decode", rows)
    if reason is not None:
        raise ValueError(f"--batch: a step of {rows} rows stays vanilla ({reason}); allowed is one in which it selects")
    return schedule


def print_table(report: dict[str, Any]) -> None:
    """Print it for people."""
    from rich import box
    from rich.table import Table

    from ..console import open_console

    model, console = report["model"], open_console()
    where = f"{report['bandwidth_gb_per_s']:g} GB/s" if report["bandwidth_gb_per_s"] else "a machine as fitted"
    where += f" ({report['gpu']})" if report["gpu"] else ""
    console.print("[bold]ESTIMATE, not a measurement[/bold]")
    console.print(
        f"{model['architecture']}: {model['moe_layers']} layers of {model['experts']} experts, top-{model['top_k']}; "
        f"{model['expert_bytes'] / 1e6:.2f} MB an expert ({model['bits_per_expert_weight']:g} bits a weight), "
        f"{model['other_bytes'] / 1e9:.2f} GB other weights a step"
    )
    keys = ", ".join(f"{key}={value}" for key, value in report["policy"]["keys"].items())
    console.print(f"{report['policy']['policy']} {keys}; {report['rows']} rows; {where}")
    pairs = [("active_experts", ".1f"), ("moe_layer_us", ".1f"), ("step_ms", ".2f")]
    columns = ["", "active experts", "MoE layer, us", "step, ms", "speedup"]
    if report["deployment"]["ranks"] > 1:
        console.print(_format_deployment(report))
        if report["deployment"]["placement"] == "ep":
            pairs.insert(1, ("fullest_rank_experts", ".1f"))
            columns.insert(2, "of the fullest rank")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for row in report["estimates"]:
        cells = [" -> ".join(format(value, spec) for value in row[name] or ()) for name, spec in pairs]
        table.add_row(f"estimate, {row['source']}", *cells, f"~{row['speedup']:.2f}")
    console.print(table)
    console.print(f"{report['formula']}.", *report["caveats"], style="dim")


def _format_deployment(report: dict[str, Any]) -> str:
    """Its ranks in a line."""
    deployment = report["deployment"]
    where = "a slice of each expert" if deployment["placement"] == "shard" else "whole experts"
    rows = "rows to their experts' ranks" if deployment["all_to_all"] else "all rows to all ranks"
    held = f"{report['weight_bytes_per_rank'] / 1e9:.0f} GB of weights a rank"
    parts = [where, rows, f"{deployment['attention']}-parallel attention", held]
    return f"{deployment['replicas']} x {deployment['ranks']} ranks: {', '.join(parts)}"
