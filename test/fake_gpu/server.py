"""A server of a small model on the GPU that is not there, and what the device and our code logged meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import requests

from benchmark.common.paths import ROOT
from benchmark.common.server import die_with_parent, free_port
from fake_gpu.models import write_model
from sglang_xshare.patching.tree import find_tree
from sglang_xshare.upstream.release import is_since

FEW_GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "--disable-prefill-cuda-graph")
XSHARE = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 4}')
FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.8"),
    *("--max-running-requests", "16", "--max-total-tokens", "8192", "--chunked-prefill-size", "2048"),
    *("--enable-metrics", "--decode-log-interval", "4"),
)
ONE_POOL = () if is_since(find_tree().release, "0.5.23") else ("--disable-hybrid-swa-memory",)
"""For gpt-oss: 0.5.17 frees the slots of the sliding window's own pool by indices that the device computes. Here it
computes none, and slots would leak or be freed twice, with and without a policy.
"""
SECONDS = 1500  # a start on a busy machine; three minutes on a quiet core


@dataclass
class Server:
    """A running server; `folder` has its output and the logs of its processes."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path

    def generate(self, requests_: int, tokens: int = 8, exact: Collection[int] = ()) -> list[dict[str, Any]]:
        """The `meta_info` of so many requests of 16 tokens each, sent at once; those of these numbers are exact."""
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        asking = params | {"custom_params": {"expert_policy": "exact"}}
        body = {
            "input_ids": [[7 * row + token for token in range(1, 17)] for row in range(1, requests_ + 1)],
            "sampling_params": [asking if row in exact else params for row in range(requests_)],
        }
        answer = requests.post(f"{self.url}/generate", json=body, timeout=SECONDS)
        answer.raise_for_status()
        return [one["meta_info"] for one in answer.json()]

    def post(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        """The answer to a POST, whatever its status."""
        return requests.post(self.url + path, json=body, timeout=SECONDS)

    def switch(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """Switch the policy. Raises AssertionError if the server refuses it."""
        answer = self.post("/expert_policy", policy)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        """The JSON that a GET answers with."""
        return requests.get(self.url + path, timeout=SECONDS).json()

    def read_metrics(self, label: str = "outcome") -> dict[str, float]:
        """Series of ours -> value, without labels but this one."""
        found: dict[str, float] = {}
        for line in requests.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if match := re.match(r"sglang:expert_policy_(\w+)\{(.*?)\} (\S+)", line):
                given = re.search(rf'{label}="([^"]*)"', match[2])
                name = f"{match[1]} {given[1]}" if given else match[1]
                found[name] = found.get(name, 0.0) + float(match[3])
        return found

    def read_output(self) -> str:
        """What it printed."""
        return (self.folder / "output").read_text(errors="replace")

    def read_log(self) -> list[str]:
        """What the device and our watch said, of all processes."""
        return [line for log in sorted((self.folder / "log").glob("*.log")) for line in log.read_text().splitlines()]

    def find_violations(self) -> list[str]:
        """What a real driver would have refused, or memory that a graph would have read though it was gone."""
        return sorted({line for line in self.read_log() if line.startswith("VIOLATION")})

    def find_waits(self) -> Counter[str]:
        """How many calls of ours have waited for the device."""
        return Counter(line.split()[1] for line in self.read_log() if line.startswith("SYNC"))

    def read_captures(self) -> list[Counter[str]]:
        """For each captured graph, how often it launches each kernel; FAKE_GPU_NODES=1 has them logged."""
        graphs: dict[str, Counter[str]] = {}
        for line in self.read_log():
            if match := re.match(r"node (\d+) (\w+) (\d+) x \d+(.*)", line):
                graphs.setdefault(match[1], Counter())[match[2] + match[4]] += 1
        return list(graphs.values())

    def stop(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def draft_eagle3(folder: Path) -> tuple[str, ...]:
    """Write a small draft model. Returns the flags of EAGLE-3 with a chain of two of its drafts."""
    flags = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    draft = write_model("qwen3-moe-eagle3", folder)
    return (*flags, "--speculative-num-draft-tokens", "3", "--speculative-draft-model-path", str(draft))


def start_server(model: str | Path, folder: Path, flags: Sequence[str], environment: Mapping[str, str]) -> Server:
    """A server of one of `models` without weights, or of a folder. Raises RuntimeError with the end of its output."""
    (folder / "log").mkdir(parents=True)
    place = model if isinstance(model, Path) else write_model(model, folder)
    weights = () if isinstance(model, Path) else ("--load-format", "dummy")
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(place), "--port", str(port)]
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(
            [*command, *weights, *FLAGS, *flags],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "python"),
                "FAKE_GPU_LOG": str(folder / "log"),
                "FAKE_GPU_NODES": "1",
                "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",  # it would run each shape, for longer than a test lasts
                **environment,
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            cwd=folder,
        )
    server = Server(process, f"http://127.0.0.1:{port}", folder)
    try:
        _wait(server)
    except BaseException:  # Ctrl-C and pytest's time limit too: its processes hold 2 GB
        server.stop()
        raise
    return server


def _wait(server: Server) -> None:
    end, output = monotonic() + SECONDS, server.folder / "output"
    while b"fired up" not in output.read_bytes():
        if server.process.poll() is not None or monotonic() > end:
            said = [line for line in output.read_text().splitlines() if "kill_process" not in line]
            raise RuntimeError("\n".join(["the server did not start:", *said[-20:], *server.find_violations()]))
        sleep(1)
