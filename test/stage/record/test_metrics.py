"""The log line, and prometheus in the multiprocess mode of a server."""

import re
import subprocess
import sys
from typing import Any

from sglang_xshare.stage.record.interval import OUTCOMES, Interval, format_log


def write(*totals: Any, exact_rows: int = 0, **outcomes: int) -> str:
    fields = [*totals, dict.fromkeys(OUTCOMES, 0) | outcomes, exact_rows]
    return format_log(Interval(*fields))


def test_log_line():
    assert write(156, 6240, 3900, 585.0, 600, 0, policy=39, prefill=2, min_rows=1) == (
        ", active experts: 40.0 -> 25.0, kept mass: 0.9750, policy steps: 39, vanilla steps: prefill 2 min_rows 1"
    )
    text = write(4, 8, 4, 3.0, 4, 2, policy=1)
    assert text == ", active experts: 2.0 -> 1.0, kept mass: 0.7500, policy steps: 1, vanilla steps: 0, rescued: 2"
    assert write(4, 8, 4, 13.0, 16, 0, policy=1, exact_rows=4) == (
        ", active experts: 2.0 -> 1.0, kept mass: 0.8125, policy steps: 1, vanilla steps: 0, exact rows: 25.0%, kept "
        "mass of the others: 0.7500"
    )
    text = write(4, 8, 8, 4.0, 4, 0, policy=1, exact_rows=4)
    assert text.endswith(", exact rows: 100.0%"), "there are no others"
    assert write(0, 0, 0, 0.0, 0, 0, min_rows=7) == ", policy steps: 0, vanilla steps: min_rows 7"


SWITCHES = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang_xshare.stage.record.figures import Exporter
from sglang_xshare.stage.record.interval import OUTCOMES, Interval
exporter = Exporter()
labels = {"model_name": "m", "tp_rank": 0}
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
plans = [{"policy": "xshare", "layers": list(range(number))} for number in (*range(41), 0, 40, 0)]
for plan in plans:
    exporter.export("in force", (plan, None), labels)
    exporter.export("in force", (plan, None), labels)
    lines = generate_latest(registry).decode().splitlines()
    print(*(line for line in lines if line.startswith("sglang:expert_policy_info{")))
outcomes = dict.fromkeys(OUTCOMES, 0)
exporter.export("counted", Interval(4, 40, 20, 7.5, 10, 0, outcomes), labels)
exporter.export("counted", Interval(4, 48, 12, 9.0, 10, 2, outcomes), labels)
for line in generate_latest(registry).decode().splitlines():
    if line.startswith("sglang:expert_policy_experts_after_total{"):
        print(line.rpartition(" ")[2])
"""


def test_of_all_plans_that_were_in_force_one_series_is_left(tmp_path):
    """As in the server, whose prometheus_client cannot remove a series; counters add up."""
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", SWITCHES], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, counter = done.stdout.splitlines()
    assert float(counter) == 32.0
    found = [re.fullmatch(r'sglang:.*_info{model_name="m",plan_hash="(\w{8})",policy="xshare",tp_rank="0"} 1.0', line)
             for line in lines]  # fmt: skip
    assert all(found), lines
    hashes = [match[1] for match in found]
    assert (len(set(hashes)), hashes[-3:]) == (41, [hashes[0], hashes[40], hashes[0]])
