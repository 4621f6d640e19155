"""What is on /metrics: dashboards and alerts of others rest on the names, kinds, texts and labels."""

import subprocess
import sys
from pathlib import Path

SURFACE = Path(__file__).with_name("metrics.txt")
"""What `EXPORT` prints today. A change of it is one of what others read."""
EXPORT = """
import os
os.environ["PROMETHEUS_DISABLE_CREATED_SERIES"] = "True"
from collections import Counter
from prometheus_client import REGISTRY, generate_latest
from sglang_xshare.stage.record.figures import Exporter
from sglang_xshare.stage.record.interval import OUTCOMES, Interval
for collector in list(REGISTRY._collector_to_names):
    REGISTRY.unregister(collector)
labels = {"model_name": "m", "tp_rank": 0}
interval = Interval(4, 40, 20, 7.5, 10, 3, dict.fromkeys(OUTCOMES, 1), 0, 30, 12, 16, 8)
nothing = Interval(0, 0, 0, 0.0, 0, 0, dict.fromkeys(OUTCOMES, 0))
former, plan = {"policy": "xshare", "k0": 1}, {"policy": "oea", "k0": 2}
exporter = Exporter()
for group, part in (
    ("counted", interval),
    ("in force", (former, None)),
    ("in force", (plan, 0.75)),
    ("counted", nothing),
    ("observed", {"oea": interval, "xshare:add=1": nothing}),
    ("compared", Counter(comparisons=5, disagreements=2, fallbacks=1)),
):
    exporter.export(group, part, labels)
print(generate_latest().decode(), end="")
"""


def test_every_figure_is_exported_as_ever():
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", EXPORT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(SURFACE.read_text().splitlines())
