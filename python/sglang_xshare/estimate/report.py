"""The estimate as JSON and as a table, marked as one in its title and in every row."""

from __future__ import annotations

import argparse
from typing import Any

from ..policies.schedule import Schedule, build_schedule
from ..policies.spelling import parse_policy
from ..types import Router
from .active import ASSUMPTIONS, draw_active, read_active
from .latency import FIXED, REACHED, estimate_step
from .weights import Weights, read_weights

FORMULA = (
    f"MoE layer = {FIXED * 1e6:.0f} us + active x expert bytes / ({REACHED:.0%} of bandwidth), step = MoE layers x "
    "that + (all other weights + KV cache) / the same"
)
CAVEATS = (
    "The constants are OEA's fit for one H100; other GPUs differ by bandwidth alone.",
    "Not in it: the selection itself, activations, sampling, the host. One GPU; no measurement. See docs/estimate.md.",
)


def estimate(arguments: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """The report. `bandwidth` in GB/s. Raises ValueError or `ExpertPolicyError`, one line."""
    weights = read_weights(arguments.model)
    rows, tokens = arguments.batch * arguments.tokens_per_request, arguments.tokens_per_request
    schedule = _read_schedule(arguments.policy, weights, rows, tokens)
    estimates = []
    for source, (before, after) in _list_active(arguments, schedule, weights, rows).items():
        steps = [
            estimate_step(weights, active, bandwidth * 1e9, rows, arguments.batch * arguments.context)
            for active in (before, after)
        ]
        estimates.append(
            {
                "is_estimate": True,
                "source": source,
                "active_experts": [before, after],
                "moe_layer_us": [step.layer * 1e6 for step in steps],
                "step_ms": [step.step * 1e3 for step in steps],
                "speedup": steps[0].step / steps[1].step,
            }
        )
    return {
        "is_estimate": True,
        "formula": FORMULA,
        "caveats": CAVEATS,
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
        "rows": rows,
        "context": arguments.context,
        "estimates": estimates,
    }


def _list_active(
    arguments: argparse.Namespace, schedule: Schedule, weights: Weights, rows: int
) -> dict[str, tuple[float, float]]:
    """Active experts before and after, by where they come from."""
    if arguments.trace is not None:
        before, after, is_policys = read_active(arguments.trace, rows, arguments.policy)
        whose = "" if is_policys else ", as its server's policy kept, whatever --policy says"
        return {f"trace {arguments.trace}{whose}": (before, after)}
    if arguments.active is not None:
        before, after = arguments.active
        for count in (before, after):
            if not 1 <= count <= weights.model.num_experts:
                raise ValueError(f"--active {count:g}: allowed is 1 to the model's {weights.model.num_experts} experts")
        return {"as given": (before, after)}
    return {
        f"assumed: {name}": draw_active(schedule, weights.model, rows, arguments.tokens_per_request, common)
        for name, common in ASSUMPTIONS.items()
    }


def _read_schedule(text: str, weights: Weights, rows: int, tokens: int) -> Schedule:
    """The policy, spelt as the server takes it. Raises ValueError where it does not run in such a step."""
    try:
        schedule = build_schedule(*parse_policy(text), speculative=tokens > 1)
        if schedule is None or schedule.observed:
            raise ValueError("routes as the model does, which the estimate compares with; allowed is another policy")
        for plan in schedule.plans(range(weights.model.num_layers)):
            plan.check(Router(top_k=weights.model.top_k), weights.model.num_experts, ranks=1)
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
    where = f"{report['bandwidth_gb_per_s']:g} GB/s" + (f" ({report['gpu']})" if report["gpu"] else "")
    console.print("[bold]ESTIMATE, not a measurement[/bold]")
    console.print(
        f"{model['architecture']}: {model['moe_layers']} layers of {model['experts']} experts, top-{model['top_k']}; "
        f"{model['expert_bytes'] / 1e6:.2f} MB an expert ({model['bits_per_expert_weight']:g} bits a weight), "
        f"{model['other_bytes'] / 1e9:.2f} GB other weights a step"
    )
    keys = ", ".join(f"{key}={value}" for key, value in report["policy"]["keys"].items())
    console.print(f"{report['policy']['policy']} {keys}; {report['rows']} rows; {where}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "active experts", "MoE layer, us", "step, ms", "speedup"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report["estimates"]:
        pairs = ("active_experts", ".1f"), ("moe_layer_us", ".1f"), ("step_ms", ".2f")
        cells = [" -> ".join(format(value, spec) for value in row[name]) for name, spec in pairs]
        table.add_row(f"estimate, {row['source']}", *cells, f"~{row['speedup']:.2f}")
    console.print(table)
    console.print(f"{report['formula']}.", *report["caveats"], style="dim")
