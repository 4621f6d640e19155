"""Readers of the expert policy's counters, which a server publishes on /metrics."""

import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmark.common.server import Server
from sglang_xshare.stage.record.figures import PREFIX


@dataclass(frozen=True)
class Evidence:
    """Means over all MoE layers and steps that used the policy. A mean is None if the server counted nothing.

    - `experts_before` and `experts_after`: active experts with the model's own routing and with the policy.
    - `kept_mass`: the share of the gating mass that the policy keeps, as a mean of the rows.
    - `policy_steps`: the number of forwards of the target model that used the policy.
    - `page_ins`: the number of experts that the server paged in.
    - `page_ins_before`: the number of experts that the model's own routing would have paged in from the same state.
    """

    experts_before: float | None
    experts_after: float | None
    kept_mass: float | None
    policy_steps: int
    page_ins: float | None = None
    page_ins_before: float | None = None


def read_totals(server: Server) -> dict[str, float]:
    """Return the policy's counters, summed over all ranks. The dict is empty if the server has no policy."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                key = f"{name}:{sample.labels['outcome']}" if "outcome" in sample.labels else name
                totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def read_settled_totals(server: Server) -> dict[str, float]:
    """Return the counters after they have stopped changing.

    The server answers the last request before it has counted the last steps.
    """
    before: dict[str, float] = {}
    while (totals := read_totals(server)) != before:
        before = totals
        time.sleep(0.2)
    return totals


def evidence_between(before: dict[str, float], after: dict[str, float]) -> Evidence:
    """Return the means for the time between two results of `read_totals`."""
    new = {name: total - before.get(name, 0.0) for name, total in after.items()}

    def mean(total: str, count: str) -> float | None:
        return new[total] / new[count] if new.get(count) and total in new else None

    return Evidence(
        experts_before=mean("experts_before", "layer_steps"),
        experts_after=mean("experts_after", "layer_steps"),
        kept_mass=mean("kept_mass", "rows"),
        policy_steps=int(new.get("steps:policy", 0) + new.get("steps:observed", 0)),
        page_ins=mean("page_ins", "layer_steps"),
        page_ins_before=mean("page_ins_before", "layer_steps"),
    )
