"""Who got which requests and why: counted, logged and exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .dispatcher import REASONS, Decision

PREFIX = "sglang:expert_affinity_"


class DecisionCounts:
    """Decisions since the last log line; all of them on `/metrics` where there is one.

    With `export`, prometheus must be in multiprocess mode by the first decision.
    """

    def __init__(self, replicas: int, export: bool = False) -> None:
        self._replicas = replicas
        self._counts: Counter[Decision] = Counter()
        self._export = export
        self._metrics: dict[str, Any] = {}

    def count(self, decision: Decision, loads: Sequence[int]) -> None:
        """Count one decision; `loads` [replicas] are the requests that each replica runs after it."""
        self._counts[decision] += 1
        if self._export:
            self._metrics = self._metrics or _make_metrics()
            labels = {"replica": str(decision.replica), "reason": decision.reason}
            self._metrics["requests"].labels(**labels).inc()
            for replica, load in enumerate(loads):
                self._metrics["running_requests"].labels(replica=str(replica)).set(load)

    def format_log(self, loads: Sequence[int]) -> str:
        """The log line, with which counting starts anew."""
        total = self._counts.total()
        reasons: Counter[str] = Counter()
        replicas = [0] * self._replicas
        for decision, count in self._counts.items():
            reasons[decision.reason] += count
            replicas[decision.replica] += count
        self._counts.clear()
        shares = ", ".join(f"{name} {reasons[name] / total:.1%}" for name in REASONS if reasons[name])
        imbalance = max(loads) * len(loads) / max(sum(loads), 1)
        sent, running = (" ".join(map(str, numbers)) for numbers in (replicas, loads))
        return (
            f"Expert affinity: {total} requests, {shares}; by replica: {sent}; running: {running}, "
            f"imbalance: {imbalance:.2f}"
        )


def _make_metrics() -> dict[str, Any]:
    from prometheus_client import Counter as Total
    from prometheus_client import Gauge

    requests = "Requests dispatched by expert affinity, by replica and by the reason of the choice"
    running = "Requests sent to a replica and not finished, at the last dispatch"
    return {
        "requests": Total(PREFIX + "requests", requests, ("replica", "reason")),
        "running_requests": Gauge(PREFIX + "running_requests", running, ("replica",), multiprocess_mode="mostrecent"),
    }
