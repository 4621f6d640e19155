"""SGLang's own router in front of two servers with a policy: it sends requests to both, and both select."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from benchmark.common.paths import BUILD
from benchmark.common.server import die_with_parent, free_port
from served.answers import NEW_TOKENS, parse_metrics, policy, read_prompts

ROUTER = "sglang-router==0.3.2"
REQUESTS = 16
FULL = ("--dtype", "float32", *policy("xshare", k0=1, add=64, utility="full"))


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


@pytest.mark.long
def test_both_servers_behind_the_router_select(servers, served, tiny_model, router_package, tmp_path):
    """Their seeds differ, since the pool starts no server twice."""
    behind = [servers(*FULL, "--random-seed", str(seed)) for seed in (1, 2)]
    before = [parse_metrics(server.get("/metrics"))["steps policy"] for server in behind]
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "round_robin", "--port", port]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(server.url for server in behind)]
    env = {"PYTHONPATH": str(router_package), "PATH": "", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    prompts = read_prompts(tiny_model)[:REQUESTS]

    def generate(prompt: str) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = requests.post(url + "/generate", json={"text": prompt, "sampling_params": sampling}, timeout=60)
        answer.raise_for_status()
        tokens: list[int] = answer.json()["output_ids"]
        return tokens

    with (tmp_path / "router.log").open("w") as log:
        router = subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        await_workers(url, len(behind))
        with ThreadPoolExecutor(REQUESTS) as threads:
            tokens = list(threads.map(generate, prompts))
    finally:
        router.kill()
        router.wait()
    assert tokens == served("unpatched").tokens[0]
    for server, steps in zip(behind, before, strict=True):
        server.generate(prompts[:2], max_new_tokens=2)  # the last step of before is published with it
        assert parse_metrics(server.get("/metrics"))["steps policy"] >= steps + NEW_TOKENS - 1


def await_workers(url: str, count: int) -> None:
    """Return once the router has so many servers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if len(requests.get(url + "/workers", timeout=5).json()["workers"]) == count:
                return
        except (requests.RequestException, KeyError, ValueError):
            pass
        time.sleep(0.5)
    raise AssertionError("the router found no servers within a minute")
