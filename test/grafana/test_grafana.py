"""The dashboard and the alert rules ask for nothing that the code does not export, and the rules fire when they should.

`test/served/test_watch.py` has a real Prometheus evaluate them on a real server.
"""

import json
import re
import shutil
import subprocess
import sys
from functools import cache

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grafana.monitoring import ALERTS, PROMETHEUS, find_groups, find_metrics, list_panels, read_rules
from scripts.fetch_release import fetch_release
from served.release import LATEST, OLDER
from sglang_xshare.stage.record.interval import OUTCOMES

EXPORT = """
from collections import Counter
from prometheus_client import generate_latest
from sglang_xshare.affinity.controller import DecisionCounts
from sglang_xshare.affinity.decision import Decision, REASONS
from sglang_xshare.stage.record.figures import Exporter
from sglang_xshare.stage.record.interval import OUTCOMES, Interval
labels = {"model_name": "m"}
interval = Interval(1, 2, 1, 1.0, 1, 0, dict.fromkeys(OUTCOMES, 1), 1, 2, 1, 1, 1)
exporter = Exporter()
exporter.export("counted", interval, labels)
exporter.export("in force", ({"policy": "xshare"}, None), labels)
exporter.export("observed", {"oea": interval}, labels)
exporter.export("compared", Counter(), labels)
DecisionCounts(2, export=True).count(Decision(0, REASONS[0]), [1, 0])
print(generate_latest().decode())
"""
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
EXPRESSIONS = [(title, expression) for title, expression, _ in list_panels()]
EXPRESSIONS += [(rule["alert"], rule["expr"]) for rule in read_rules()]
SERIES = 'model_name="m", instance="i"'


@cache
def exported() -> dict[str, set[str]]:
    """The labels of every sample that our exporters make."""
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", EXPORT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    families = text_string_to_metric_families(done.stdout)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@cache
def upstreams(release: str) -> str:
    """The source of SGLang's own metrics."""
    return (fetch_release(release) / "sglang/srt/observability/metrics_collector.py").read_text()


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_metric_and_label_is_exported(title, expression):
    metrics = find_metrics(expression)
    assert metrics
    known = set(SCRAPED)
    for name, labels in metrics.items():
        if name in exported():
            known |= exported()[name]
            assert labels <= exported()[name] | SCRAPED, name
        else:
            assert not re.match("sglang:expert_", name), f"{name}: nothing exports it"
            for release in (LATEST, *OLDER):
                assert f'name="{name}"' in upstreams(release), f"{name}, SGLang {release}"
            assert labels <= {"model_name"} | SCRAPED, name
            known |= {"model_name"}
    assert set(find_groups(expression)) <= known
    outcomes = {one for listed in re.findall(r'outcome(?:=~|!~|=)"([^"]*)"', expression) for one in listed.split("|")}
    assert outcomes <= set(OUTCOMES)


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ", ".join([SERIES, *(f'{label}="{value}"' for label, value in labels.items())])
    return {"series": f"sglang:{name}{{{text}}}", "values": values}


GOOD = [
    series("expert_policy_layer_steps_total", "0+400x180"),
    series("expert_policy_experts_before_total", "0+20000x180"),
    series("expert_policy_experts_after_total", "0+12000x180"),
    series("expert_policy_kept_mass_total", "0+5700x180"),
    series("expert_policy_rows_total", "0+6000x180"),
    series("expert_policy_rescued_rows_total", "0+0x180"),
    series("expert_policy_steps_total", "0+100x180", outcome="policy"),
    series("expert_policy_steps_total", "0+20x180", outcome="prefill"),
    series("expert_policy_steps_total", "0+10x180", outcome="min_rows"),
    series("expert_policy_steps_total", "0+0x180", outcome="no_context"),
    series("expert_policy_rank_disagreements_total", "0+0x180"),
    series("expert_policy_info", "1+0x180", policy="xshare", plan_hash="1"),
    series("num_running_reqs", "8+0x180"),
    series("spec_accept_length", "3+0x180"),
]
"""Of a server that does well, once a minute for three hours."""
BAD: dict[str, list[dict[str, str]]] = {
    "ExpertPolicyKeptMassLow": [series("expert_policy_kept_mass_total", "0+4800x180")],
    "ExpertPolicyDoesNothing": [series("expert_policy_steps_total", "0+0x180", outcome="policy")],
    "ExpertPolicySavesNothing": [series("expert_policy_experts_after_total", "0+19900x180")],
    "ExpertPolicyRescuesRows": [series("expert_policy_rescued_rows_total", "0+100x180")],
    "ExpertPolicyOutsideForward": [series("expert_policy_steps_total", "0+1x180", outcome="no_context")],
    "ExpertPolicyRanksDisagree": [series("expert_policy_rank_disagreements_total", "0+0x175 1+0x5")],
    "ExpertPolicyAcceptedLengthFell": [series("spec_accept_length", "3+0x140 2+0x40")],
    "ExpertPolicyPlansDiffer": [
        {"series": 'sglang:expert_policy_info{model_name="m", instance="j", plan_hash="2"}', "values": "1+0x180"}
    ],
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, a program of Prometheus's, is not installed")
@pytest.mark.parametrize("alert", [None, *(rule["alert"] for rule in read_rules())])
def test_an_alert_fires_where_it_should_and_nowhere_else(alert, tmp_path):
    changed = {one["series"]: one for one in BAD[alert]} if alert else {}
    names = {one["series"] for one in GOOD}
    inputs = [changed.get(one["series"], one) for one in GOOD] + [changed[name] for name in changed.keys() - names]
    checks = [
        {"eval_time": "3h", "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
         "exp_samples": [{"labels": "{}", "value": int(name == alert)}]}
        for name in BAD
    ]  # fmt: skip
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": checks}]
    content = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.json").write_text(json.dumps(content))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, a program of Prometheus's, is not installed")
def test_prometheus_takes_the_configuration():
    done = subprocess.run(["promtool", "check", "config", PROMETHEUS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
