"""`sglang-xshare top` and a real Prometheus, watching a real server."""

import json
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest
import requests

from benchmark.common.server import free_port
from grafana.monitoring import FOLDER, fill, list_panels, read_configuration, read_dashboard, read_rules
from served.answers import LAYERS, parse_metrics, read_plans, read_prompts
from served.load import post, wait_for
from served.release import LATEST
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client

FLAGS = ("--expert-policy", 'observe:{"plans": ["oea:k0=3"]}', "--decode-log-interval", "4", "--dtype", "float32")
XSHARE = {"policy": "xshare", "k0": 1, "add": 6}
ABSENT = ("Experts on the fullest rank", "Affinity", "Ranks", "Page-ins")
"""Panels of what this server has not: expert parallelism, replicas by affinity, several ranks, paged experts."""
WINDOW = "1m"

pytestmark = pytest.mark.long


@pytest.fixture
def server(servers, patched_release):
    return servers(*FLAGS, release=patched_release(LATEST))


def answer_prompts(server, model):
    server.generate(read_prompts(model), max_new_tokens=24, ignore_eos=True)


def read_layers(capsys, server, *words):
    """The rows of the layers that have selected: number, experts before and after, kept mass."""
    assert main(["top", server.url]) == 0
    out = capsys.readouterr().out
    for said in ("by layer, since the last switch:", *words):
        assert said in out
    rows = [
        [cell for cell in line.split() if cell[0].isdigit()]
        for line in out.splitlines()
        if line[:8].strip()[:1].isdigit()
    ]
    return [[float(cell) for cell in row] for row in rows if len(row) == 4]


def test_top_shows_what_the_server_counts(server, tiny_model, capsys):
    assert post(server, XSHARE).ok
    answer_prompts(server, tiny_model)
    layers = read_layers(capsys, server, "since the last: active experts: ", "add=6")
    assert [number for number, *_ in layers] == list(range(LAYERS))
    assert all(0 < after <= before <= 64 for _, before, after, _ in layers)
    told = Client(server.url).get_policy()
    counted, metrics = told["counters"], parse_metrics(server.get("/metrics"))
    assert told["since_switch"]["mean_after"] < 0.8 * told["since_switch"]["mean_before"]
    assert sum(layer["experts_after"] for layer in counted["by_layer"]) == counted["experts_after"]
    assert metrics["experts_after_total"] <= counted["experts_after"]
    assert post(server, {"policy": "observe", "plans": ["oea:k0=3"]}).ok
    assert read_plans(server.get("/metrics")) == [server.get(PATH)["plan_hash"]]
    assert read_layers(capsys, server) == []


@contextmanager
def prometheus(target, scratch):
    """A Prometheus that scrapes one server every second. Gives what asks its HTTP API."""
    config = read_configuration()
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target.removeprefix("http://")]}]
    (scratch / "prometheus.yml").write_text(json.dumps(config))
    url = f"http://127.0.0.1:{free_port()}"
    flags = [f"--config.file={scratch}/prometheus.yml", f"--storage.tsdb.path={scratch}/data"]
    command = ["prometheus", *flags, f"--web.listen-address={url.removeprefix('http://')}"]

    def ask(path, **parameters):
        answer = requests.get(f"{url}/api/v1/{path}", parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    with (scratch / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(lambda: is_up(url))
            yield ask
        finally:
            process.terminate()
            process.wait(20)


def is_up(url):
    with suppress(requests.RequestException):
        return requests.get(f"{url}/-/ready", timeout=1).ok


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_evaluates_every_expression(server, tiny_model, tmp_path):
    with prometheus(server.url, tmp_path) as ask:
        wait_for(lambda: ask("query", query="up == 1")["result"])
        for policy in (XSHARE, {"policy": "observe", "plans": ["oea:k0=3"]}):
            assert post(server, policy).ok
            for _ in range(2):
                answer_prompts(server, tiny_model)
                time.sleep(3)
        found = {}
        for title, expression, legend in list_panels():
            result = ask("query", query=fill(expression, WINDOW))["result"]
            values = [sample["value"][1] for sample in result]
            found[title, legend] = [value for value in values if value != "NaN"]
        assert {title for (title, _), values in found.items() if not values} == {
            title for title, *_ in found if title.startswith(ABSENT)
        }
        before = float(found["Active experts of a layer and step", "before: the model's own routing"][0])
        after = float(found["Active experts of a layer and step", "after: active"][0])
        assert 8 < after < before <= 64
        [annotation] = [one["expr"] for one in read_dashboard()["annotations"]["list"]]
        switched = ask("query", query=fill(annotation, WINDOW))["result"]
        assert [float(sample["value"][1]) > 0 for sample in switched] == [True]
        rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in read_rules()}
        assert all(rule["lastError"] == "" for rule in rules if "lastError" in rule)
