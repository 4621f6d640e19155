"""The estimate as JSON and as a table, marked as one in its title and in every row."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..policies.schedule import Schedule, build_schedule
from ..policies.spelling import parse_policy
from ..types import Router
from .active import ASSUMPTIONS, MOST_ROWS, Drawn, Load, draw_loads, read_active
from .latency import FIXED, REACHED, estimate_step
from .weights import Weights, read_weights

FORMULA = (
    f"MoE layer = {FIXED * 1e6:.0f} us + active x expert bytes / ({REACHED:.0%} of bandwidth), step = MoE layers x "
    "that + (all other weights + KV cache) / the same"
)
OF_RANKS = "; ranks: what the one reads that a step waits for"
CAVEATS = (
    "The constants are OEA's fit for one H100; other GPUs differ by bandwidth alone.",
    "Not in it: the selection itself, activations, sampling, the host, exchanges between ranks; no measurement. See "
    "docs/check.md.",
)


def estimate(arguments: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """The report. `bandwidth` in GB/s. Raises ValueError in one line."""
    weights = read_weights(arguments.model)
    ranks, tokens, rows = arguments.ep_size, arguments.draft_tokens, arguments.batch * arguments.draft_tokens
    if weights.model.num_experts % ranks:
        raise ValueError(f"--ep-size {ranks}: allowed is a divisor of the {weights.model.num_experts} experts")
    if arguments.active and len(arguments.policies) > 1:
        raise ValueError(f"--active with {len(arguments.policies)} policies: allowed is the one whose experts they are")
    # Each rank holds its own requests' cache, and the step waits for the rank with most of them.
    cached = arguments.context * -(-arguments.batch // ranks)
    schedules = {text: _read_schedule(text, weights, rows, tokens, ranks) for text in arguments.policies}
    estimates = []
    for text, schedule in schedules.items():
        for source, drawn in _list_loads(arguments, text, schedule, weights, rows):
            loads = drawn.before, drawn.after
            steps = [estimate_step(weights, load.fullest, cached, bandwidth * 1e9) for load in loads]
            estimates.append(
                {
                    "is_estimate": True,
                    "policy": text,
                    "source": source,
                    "active_experts": None if arguments.active and ranks > 1 else [load.active for load in loads],
                    "fullest_rank_experts": [load.fullest for load in loads],
                    "kept_mass": drawn.kept_mass,
                    "moe_layer_us": [step.layer * 1e6 for step in steps],
                    "step_ms": [step.step * 1e3 for step in steps],
                    "speedup": steps[0].step / steps[1].step,
                }
            )
    return {
        "is_estimate": True,
        "formula": FORMULA + (OF_RANKS if ranks > 1 else ""),
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
        "policies": {text: schedule.keys for text, schedule in schedules.items()},
        "gpu": arguments.gpu,
        "bandwidth_gb_per_s": bandwidth,
        "ep_size": ranks,
        "rows": rows,
        "context": arguments.context,
        "estimates": estimates,
    }


def _list_loads(
    arguments: argparse.Namespace, text: str, schedule: Schedule, weights: Weights, rows: int
) -> Iterator[tuple[str, Drawn]]:
    """(where they come from, active experts before and after)."""
    model, ranks = weights.model, arguments.ep_size
    if arguments.trace is not None:
        if ranks > 1:
            raise ValueError("--trace with --ep-size: it tells no rank's experts; allowed is --active, the fullest's")
        before, after, is_policys = read_active(arguments.trace, rows, text)
        whose = "" if is_policys else ", as its server's policy kept, whatever POLICY says"
        yield f"trace {arguments.trace}{whose}", _give(before, after)
    elif arguments.active is not None:
        most = model.num_experts // ranks
        for count in arguments.active:
            if not 1 <= count <= most:
                whose = "the model's" if ranks == 1 else "a rank's"
                raise ValueError(f"--active {count:g}: allowed is 1 to {whose} {most} experts")
        yield "as given", _give(*arguments.active)
    elif rows > MOST_ROWS:
        many = f"--batch {arguments.batch}: a step of {rows:,} rows"
        raise ValueError(f"{many}: allowed are at most {MOST_ROWS:,} without --active or --trace")
    else:
        for name, common in ASSUMPTIONS.items():
            yield f"assumed: {name}", draw_loads(schedule, model, rows, arguments.draft_tokens, common, ranks)


def _give(before: float, after: float) -> Drawn:
    """Experts as somebody knows them."""
    return Drawn(Load(before, before), Load(after, after), None)


def _read_schedule(text: str, weights: Weights, rows: int, tokens: int, ranks: int) -> Schedule:
    """The policy, spelt as the server takes it. Raises ValueError where it does not run in such a step."""
    try:
        schedule = build_schedule(*parse_policy(text), tokens > 1, "--draft-tokens N above 1")
        if schedule is None or schedule.observed:
            raise ValueError("routes as the model does, which the estimate compares with; allowed is another policy")
        for plan in schedule.plans(range(weights.model.num_layers)):
            plan.check(Router(top_k=weights.model.top_k), weights.model.num_experts, ranks)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    reason = schedule.reason_to_skip("verify" if tokens > 1 else "decode", rows)
    if reason is not None:
        raise ValueError(f"--batch: a step of {rows} rows stays vanilla ({reason}); allowed is one in which it selects")
    return schedule


def print_table(report: dict[str, Any]) -> None:
    """Print it for people."""
    from rich import box
    from rich.table import Table

    from ..console import open_console

    model, ranks, console = report["model"], report["ep_size"], open_console()
    where = f"{report['bandwidth_gb_per_s']:g} GB/s" + (f" ({report['gpu']})" if report["gpu"] else "")
    console.print("[bold]ESTIMATE, not a measurement[/bold]")
    console.print(
        f"{model['architecture']}: {model['moe_layers']} layers of {model['experts']} experts, top-{model['top_k']}; "
        f"{model['expert_bytes'] / 1e6:.2f} MB an expert ({model['bits_per_expert_weight']:g} bits a weight), "
        f"{model['other_bytes'] / 1e9:.2f} GB other weights a step"
    )
    console.print(f"{report['rows']} rows; {where}" + (f"; {ranks} ranks of whole experts" if ranks > 1 else ""))
    pairs = [("active_experts", ".1f"), ("moe_layer_us", ".1f"), ("step_ms", ".2f")]
    columns = ["", "policy", "active experts", "MoE layer, us", "step, ms", "speedup"]
    if ranks > 1:
        pairs.insert(1, ("fullest_rank_experts", ".1f"))
        columns.insert(3, "of the fullest rank")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "policy") else "right")
    for row in report["estimates"]:
        cells = [" -> ".join(format(value, spec) for value in row[name] or ()) for name, spec in pairs]
        table.add_row(f"estimate, {row['source']}", row["policy"], *cells, f"~{row['speedup']:.2f}")
    console.print(table)
    console.print(f"{report['formula']}.", *report["caveats"], style="dim")
