"""Upstream's own, unmodified `python -m sglang.bench_serving` against a running server."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.serving.server import LOGS, Server


@dataclass(frozen=True)
class Load:
    """What one run sends: `requests` prompts of a file, `concurrency` at a time, `output_tokens` greedy tokens each."""

    prompts: Path
    requests: int
    concurrency: int
    output_tokens: int
    seed: int = 0


def bench_command(server: Server, tokenizer: Path, load: Load, output: Path) -> list[str]:
    """The command line of one run."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", server.url, "--model", str(tokenizer), "--dataset-name", "custom"),
        *("--dataset-path", str(load.prompts), "--sharegpt-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--seed", str(load.seed), "--disable-tqdm", "--output-file", str(output)),
    ]


def run_bench(server: Server, tokenizer: Path, load: Load) -> dict[str, Any]:
    """Run it once: upstream's own result record, without its copy of the settings.

    Raises:
        RuntimeError: it failed, or not every request was answered; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.jsonl"
        command = bench_command(server, tokenizer, load, output)
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"bench-{server.log.name}"
        with log.open("ab") as stream:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=_offline()
            ).returncode
        result = json.loads(output.read_text().splitlines()[-1]) if status == 0 and output.exists() else {}
    if result.get("completed") != load.requests:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        answered = f"{result.get('completed', 0)} of {load.requests} requests answered"
        raise RuntimeError(
            f"bench_serving against {server.name}: status {status}, {answered}; the end of {log}:\n{tail}"
        )
    # The request rate is infinite, which JSON cannot say.
    return {key: value for key, value in result.items() if key not in ("server_info", "request_rate")}


def _offline() -> dict[str, str]:
    return dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
