"""The Grafana dashboard and the alert rules of examples/grafana, as expressions of Prometheus."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from benchmark.common.paths import ROOT

FOLDER = ROOT / "examples/grafana"
DASHBOARD, ALERTS, PROMETHEUS = (FOLDER / name for name in ("expert-policy.json", "alerts.yaml", "prometheus.yaml"))
NAME = r"sglang:[a-z_]+"
SELECTOR = re.compile(rf"(?P<name>{NAME})(?:\{{(?P<matchers>[^}}]*)\}})?")


def read_dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def read_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def read_configuration() -> dict[str, Any]:
    """Prometheus's."""
    return yaml.safe_load(PROMETHEUS.read_text())


def list_panels() -> Iterator[tuple[str, str, str]]:
    """(title, expression, legend) of every target."""
    for panel in read_dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target.get("legendFormat", "")


def fill(expression: str, window: str) -> str:
    """A panel's expression as Grafana sends it with every variable at All."""
    return re.sub(r"\$(model|instance)\b", ".*", expression).replace("$__rate_interval", window)


def find_metrics(expression: str) -> dict[str, set[str]]:
    """The labels that an expression asks of each metric."""
    found: dict[str, set[str]] = {}
    for selector in SELECTOR.finditer(expression):
        matchers = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', selector["matchers"] or "")
        found.setdefault(selector["name"], set()).update(matchers)
    return found


def find_groups(expression: str) -> list[str]:
    """The labels that it groups by."""
    listed = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression)
    return [label.strip() for labels in listed for label in labels.split(",") if label.strip()]
