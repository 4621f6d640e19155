"""Schedules to switch to, and steps between two switches."""

from types import SimpleNamespace
from typing import Any

from sglang_xshare.policies.schedule import Schedule, build_schedule
from stage.fake import Model, run

PLANS: list[dict[str, Any]] = [
    {"policy": "xshare", "k0": 1, "add": 5},
    {"policy": "oea", "k0": 2, "kmax": 6},
    {"policy": "pruned", "k0": 1},
    {"policy": "lynx-lat", "retain": 7},
    {"policy": "lynx-acc", "confidence": 0.2},
    {"policy": "moe-spec", "budget": 6, "coverage": "truncate", "phases": ["decode"]},
    {"policy": "dynamic-skip", "beta": 0.5},
]


def schedule(keys: dict[str, Any]) -> Schedule | None:
    own = {name: value for name, value in keys.items() if name != "policy"}
    return build_schedule(keys["policy"], own, speculative=False)


def decode(model: Model, reporter: SimpleNamespace, rows: int = 12) -> None:
    """A step, as upstream's scheduler counts it."""
    run(model, "decode", rows)
    reporter.scheduler.forward_ct += 1
    reporter.forward_ct_decode += 1
