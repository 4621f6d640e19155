"""The server's counts of its expert policy on /metrics, between two readings."""

import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmark.common.server import Server
from sglang_xshare.stage.record.figures import PREFIX


@dataclass(frozen=True)
class Evidence:
    """Means over the MoE layers and steps under the policy; None if the server counted none.

    Active experts under upstream's own routing, and under the policy; the share of gating mass kept, mean of rows.
    `policy_steps`: forwards of the target model under policy. `page_ins`: experts paged in, and what upstream's own
    routing would have paged in from the same state.
    """

    experts_before: float | None
    experts_after: float | None
    kept_mass: float | None
    policy_steps: int
    page_ins: float | None = None
    page_ins_before: float | None = None


def read_totals(server: Server) -> dict[str, float]:
    """Return the stage's counters, summed over ranks; {} if the server runs no policy."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                key = f"{name}:{sample.labels['outcome']}" if "outcome" in sample.labels else name
                totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def read_settled_totals(server: Server) -> dict[str, float]:
    """Return the counters once they are constant: an idle server reports the last steps after its answers."""
    before: dict[str, float] = {}
    while (totals := read_totals(server)) != before:
        before = totals
        time.sleep(0.2)
    return totals


def evidence_between(before: dict[str, float], after: dict[str, float]) -> Evidence:
    """Return the counts between two calls of `read_totals`."""
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
