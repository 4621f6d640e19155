"""What is on /metrics: dashboards and alerts of others rest on the names, kinds, texts and labels."""

import subprocess
import sys
from pathlib import Path

SURFACE = Path(__file__).with_name("metrics.txt")
"""What `EXPORT` prints today. A change of it is one of what others read."""
EXPORT = """
import os
os.environ["PROMETHEUS_DISABLE_CREATED_SERIES"] = "True"
from prometheus_client import REGISTRY, generate_latest
from sglang_xshare.stage.evidence.agreement import Compared
from sglang_xshare.stage.evidence.balance import RankLoad
from sglang_xshare.stage.evidence.figures import Exporter, InForce
from sglang_xshare.stage.evidence.interval import OUTCOMES, Interval
from sglang_xshare.stage.evidence.observe import Observed
for collector in list(REGISTRY._collector_to_names):
    REGISTRY.unregister(collector)
labels = {"model_name": "m", "tp_rank": 0}
interval = Interval(4, 40, 20, 7.5, 10, 3, dict.fromkeys(OUTCOMES, 1), 0, 30, 12)
nothing = Interval(0, 0, 0, 0.0, 0, 0, dict.fromkeys(OUTCOMES, 0))
former, plan = {"policy": "xshare", "k0": 1}, {"policy": "oea", "k0": 2}
exporter = Exporter()
for part in (
    interval,
    InForce(former, None),
    InForce(plan, former, 0.75),
    nothing,
    RankLoad(4, 40, 20, 16.0, 10.0),
    RankLoad(0, 0, 0, 0.0, 0.0),
    Observed({"oea": interval, "xshare:add=1": nothing}, {"1-2": 1, "3-4": 0}),
    Compared(5, [0, 2], 1),
):
    exporter.export(part, labels)
print(generate_latest().decode(), end="")
"""


def test_every_figure_is_exported_as_ever():
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", EXPORT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(SURFACE.read_text().splitlines())


REFUSED = """
from types import SimpleNamespace
from prometheus_client import REGISTRY
from sglang_xshare.stage.evidence.balance import RankLoad
from sglang_xshare.stage.evidence.counters import Counters
from sglang_xshare.stage.evidence.interval import OUTCOMES, Interval
from sglang_xshare.stage.evidence.reports import Reports
reports = Reports(Counters(1, "cpu"), None)
parts = Interval(4, 40, 20, -7.5, 10, -3, dict.fromkeys(OUTCOMES, 1)), RankLoad(4, 40, 16, 20.0, 10.0)
reports._read = lambda compared: iter(parts)
collector = SimpleNamespace(labels={"model_name": "m"})
reports.publish(SimpleNamespace(current_scheduler_metrics_enabled=True, metrics_collector=collector))
for name in ("experts_after", "kept_mass", "rows", "rescued_rows", "fullest_rank_experts_after"):
    print(name, REGISTRY.get_sample_value(f"sglang:expert_policy_{name}_total", {"model_name": "m"}))
"""


def test_a_refused_value_keeps_no_other_from_being_exported():
    """What was read is not read again. A counter refuses a number below 0."""
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", REFUSED], env=env, capture_output=True, text=True)
    assert "non-negative" in done.stderr
    assert done.stdout.splitlines() == [
        "experts_after 20.0",
        "kept_mass 0.0",
        "rows 10.0",
        "rescued_rows 0.0",
        "fullest_rank_experts_after 16.0",
    ]
