"""The report of `check` as tables: the server, its memory, and one row for each policy."""

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..console import open_console, spell_bytes

AUTO = "auto: each layer chooses when it loads, and is checked then"
UNCHECKED = "the routers of the loaded layers, which needs weights; the first step of a server"
CAVEATS = (
    "The constants are from one H100; other GPUs differ only in bandwidth.",
    "The estimate has no exchanges between ranks, and no term for the selection and sampling.",
)


def print_table(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    console = open_console()
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in list_rows(report):
        table.add_row(name, escape(str(text)))
    console.print(table)
    if report.get("estimate"):
        _print_estimate(console, report["estimate"])
    if "start" in report:
        console.print(f"Start it: {report['start']}", soft_wrap=True, markup=False)


def list_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the first table. Each row is a heading and a text."""
    rows = [("verdict", report["verdict"])]
    if report["sglang"]:
        rows.append(("SGLang", f"{report['sglang']}, on {report['gpu'] or 'this machine'}"))
    rows += [("not answered", reason) for reason in report["not_answered"]]
    rows += [(f"refused by {refusal['by']}", refusal["says"]) for refusal in report.get("refusals", ())]
    rows += [(f"{warning['by']} warns", warning["says"]) for warning in report.get("warnings", ())]
    rows += _list_memory(report)
    if "model" in report:
        model = report["model"]
        shape = f"{model['layers']} layers, {model['experts']} experts, top-{model['top_k']}"
        family = model["executed_as"]
        told = f"{family} is served in tests, small and on a CPU" if family else "no test has served its class"
        rows.append(("model", f"{model['architecture']}: {shape}; {told}"))
    if plan := report.get("plan"):
        keys = {name: value for name, value in plan.items() if name not in ("policy", "overrides")}
        rows.append(("policy", f"{plan['policy']} {_join(keys)}"))
        rows += [("override", json.dumps(override)) for override in plan.get("overrides", ())]
    if "moe_runner" in report:
        rows.append(("MoE runner", AUTO if report["moe_runner"] == "auto" else report["moe_runner"]))
    if report["sglang"]:
        rows.append(("not checked", UNCHECKED))
    if never := report.get("never_executed"):
        rows.append(("never executed", "; ".join(never)))
    return rows


def _list_memory(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if weights := report.get("weights"):
        layers = f"{weights['moe_layers']} layers x {weights['experts']} x {spell_bytes(weights['expert_bytes'])}"
        text = f"{spell_bytes(weights['total_bytes'])}: experts {spell_bytes(weights['all_experts_bytes'])} ({layers}, "
        bits = weights["bits_per_expert_weight"]
        text += f"{f'{bits:g} bits a weight' if bits else 'as its safetensors store them'}), "
        text += f"all else {spell_bytes(weights['other_bytes'])}"
        held = weights["gpu_bytes"]
        rows.append(("weights", text if held == weights["total_bytes"] else f"{text}; {spell_bytes(held)} on each GPU"))
    if memory := report.get("memory"):
        share = f" x {memory['fraction']:g}" if memory["fraction"] else ""
        whole = f"{report['gpu']}: {spell_bytes(memory['gpu_bytes'])}{share}"
        if memory["fits"]:
            at_most = "" if share else "at most "
            per_token = spell_bytes(report["weights"]["cache_bytes_per_token"])
            tokens = f"{memory['cache_tokens']:,} tokens of {per_token}"
            text = f"{whole}; left for the KV cache: {at_most}{spell_bytes(memory['left_bytes'])}, {tokens}"
        else:
            fit = f"{memory['resident_experts']} of {report['weights']['experts']} experts a layer would fit resident"
            text = f"{whole}: the weights do not fit; {fit}"
        rows.append(("memory", text))
    return rows


def _join(keys: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items() if text != "null")


def _print_estimate(console: Console, estimate: dict[str, Any]) -> None:
    rows = estimate["estimates"]
    console.print(f"[bold]ESTIMATE, not a measurement[/bold]: {estimate['requests']} requests, {estimate['rows']} rows")
    names = {"active_experts": ("active experts", ",.1f"), "fullest_rank_experts": ("of the fullest rank", ",.1f")}
    if all(row["active_experts"] == row["fullest_rank_experts"] for row in rows):
        del names["fullest_rank_experts"]
    names["kept_mass"] = ("kept mass", ".3f")
    if any("step_ms" in row for row in rows):
        names |= {"step_ms": ("step, ms", ",.2f"), "tokens_per_s": ("tokens/s", ",.0f"), "speedup": ("speedup", ".2f")}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", overflow="fold")
    for heading, _ in names.values():
        table.add_column(heading, justify="right")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    own = [row for row in rows if row["policy"] == policies[0]]
    table.add_row("vanilla", *(_spell_range(own, name, spec, 0) for name, (_, spec) in names.items()))
    for policy in (policy for policy in policies if policy != "vanilla"):
        same = [row for row in rows if row["policy"] == policy]
        table.add_row(escape(policy), *(_spell_range(same, name, spec, 1) for name, (_, spec) in names.items()))
    console.print(table)
    console.print(*(f"{line}\n" for line in list_notes(estimate)), sep="", end="", style="dim", markup=False)


def _spell_range(rows: list[dict[str, Any]], name: str, spec: str, side: int) -> str:
    """Return the text of a table cell. `side` is 0 for the model's own routing and 1 for the policy."""
    values = [row.get(name) for row in rows]
    if name in ("kept_mass", "speedup"):
        values = [1.0 if side == 0 else value for value in values]
    texts = [format(value[side] if isinstance(value, list) else value, spec) for value in values if value is not None]
    return " - ".join(dict.fromkeys(texts))


def list_notes(estimate: dict[str, Any]) -> list[str]:
    """Return the notes under the table: the assumptions, the formula and the known errors."""
    notes = []
    sources = list(dict.fromkeys(row["source"] for row in estimate["estimates"]))
    if len(sources) > 1:
        notes.append(
            "A - B: A for rows that agree as OEA measured for Qwen3-30B-A3B (no other model was measured), B for rows "
            "that route independently. --active with figures of your own traffic replaces both."
        )
    else:
        notes.append(f"Active experts: {sources[0]}.")
    notes += [f"{text}: {_join(keys)}." for text, keys in estimate["policies"].items() if "=" not in text and keys]
    if estimate["rows"] > estimate["requests"]:
        notes.append("tokens/s: for one accepted token a request and step; multiply by the accepted tokens.")
    if estimate["bandwidth_gb_per_s"] is not None:
        notes.append(f"{estimate['formula']}.")
        notes.append(estimate["missed"])
        notes += CAVEATS
    return notes
