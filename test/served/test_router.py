"""SGLang's own router in front of two servers with a policy: it sends requests to both, and both select."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import requests

from benchmark.common.paths import BUILD
from benchmark.common.server import die_with_parent, free_port
from live.conftest import answering
from served.answers import FULL, NEW_TOKENS, greedy, parse_metrics
from served.load import wait_for

__all__ = ["answering"]
ROUTER = "sglang-router==0.3.2"


@pytest.fixture(scope="session")
def router_package() -> Path:
    """A folder for the path, with the router in it: a package of its own, without its dependencies."""
    folder = BUILD / "router"
    if not folder.is_dir():
        half = BUILD / ".router"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(half)]
        subprocess.run([*install, ROUTER], check=True)
        half.rename(folder)
    return folder


@contextmanager
def routing(package: Path, scratch: Path, workers: list[str]) -> Iterator[str]:
    """Within it a router is in front of these servers, by its URL."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "round_robin", "--port", port]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *workers]
    env = {"PYTHONPATH": str(package), "PATH": "", "HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    with (scratch / "router.log").open("w") as log:
        router = subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        wait_for(lambda: count_workers(url) == len(workers))
        yield url
    finally:
        router.kill()
        router.wait()


EXACT = {"custom_params": {"expert_policy": "exact"}}
FIELDS = {**EXACT, "priority": 10, "session_id": "s", "routed_dp_rank": 0, "extra_key": "k", "rid": "r"}
DROPPED: dict[str, set[str] | None] = {
    "/v1/chat/completions": set(FIELDS),
    "/v1/completions": set(),
    "/generate": {"custom_params", "session_id", "routed_dp_rank"},
    "/v1/messages": None,
    "/api/chat": None,
    "/api/generate": None,
}
"""What the router drops by operations.md: by route, fields that do not arrive; None for a route that it lacks."""


@pytest.mark.long
def test_which_fields_the_router_drops(router_package, tmp_path, answering):
    """A header asks in their place: `X-SMG-Routing-Key`, which SGLang reads on /v1."""
    worker = answering(json.dumps({"model_path": "m", "served_model_name": "m", "is_generation": True}).encode())
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "text": "a", "max_tokens": 4}
    headers = {"X-SMG-Routing-Key": "user-7;expert_policy=exact", "X-Override-Priority": "10"}
    statuses = {}
    with routing(router_package, tmp_path, [worker.url]) as url:
        for route in DROPPED:
            asked = FIELDS | body | ({"sampling_params": EXACT} if route == "/generate" else {})
            statuses[route] = requests.post(url + route, json=asked, headers=headers, timeout=30).status_code
    came = {
        path: (sent, body)
        for sent, (method, path, _, body) in zip(worker.headers, worker.asked, strict=True)
        if method == "POST"
    }
    assert {route for route, status in statuses.items() if status == 404} == DROPPED.keys() - came.keys()
    for route, dropped in DROPPED.items():
        if dropped is None:
            assert route not in came
            continue
        sent, got = came[route]
        got = got | got["sampling_params"] if route == "/generate" else got
        assert {name for name in FIELDS if got.get(name) is None} == dropped, route
        assert sent["x-smg-routing-key"] == "user-7;expert_policy=exact"
        assert "x-override-priority" not in sent


@pytest.mark.long
def test_both_servers_behind_the_router_select(servers, served, prompts, router_package, tmp_path):
    """Their seeds differ, since the pool starts no server twice."""
    behind = [servers("--dtype", "float32", *FULL, "--random-seed", str(seed)) for seed in (1, 2)]
    before = [parse_metrics(server.get("/metrics"))["steps policy"] for server in behind]

    def generate(url, prompt):
        body = {"text": prompt, "sampling_params": greedy(NEW_TOKENS)}
        answer = requests.post(url + "/generate", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()["output_ids"]

    with (
        routing(router_package, tmp_path, [server.url for server in behind]) as url,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        tokens = list(threads.map(partial(generate, url), prompts))
    assert tokens == served("unpatched").tokens[0]
    for server, steps in zip(behind, before, strict=True):
        server.generate(prompts[:2], max_new_tokens=2)  # the last step of before is published with it
        assert parse_metrics(server.get("/metrics"))["steps policy"] >= steps + NEW_TOKENS - 1


def count_workers(url: str) -> int | None:
    """The number of servers that the router has found; None before it answers."""
    with suppress(requests.RequestException, KeyError, ValueError):
        return len(requests.get(url + "/workers", timeout=5).json()["workers"])
    return None
