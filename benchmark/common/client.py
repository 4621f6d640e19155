"""Upstream's own, unmodified bench_serving against a running server."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.common.paths import LOGS, ROOT
from benchmark.common.server import Server, die_with_parent


@dataclass(frozen=True)
class Load:
    """The load of one run: `requests` prompts of a file, `concurrency` at a time, `output_tokens` tokens each."""

    prompts: Path
    requests: int
    concurrency: int
    output_tokens: int
    seed: int = 0
    temperature: float = 0.0


def bench_args(server: Server, tokenizer: Path, load: Load, output: Path) -> list[str]:
    """Return the arguments of `python -m sglang.benchmark.serving` for one run."""
    return [
        *("--backend", "sglang", "--base-url", server.url, "--model", str(tokenizer), "--dataset-name", "custom"),
        *("--dataset-path", str(load.prompts), "--sharegpt-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        # The caller has warmed up at the full concurrency; one request alone would take longer than some runs.
        *("--warmup-requests", "0", "--seed", str(load.seed), "--disable-tqdm", "--output-file", str(output)),
        *("--temperature", str(load.temperature)),
    ]


class Client:
    """Runs of bench_serving, one after another, in the process of `bench_worker`, which the first run starts."""

    def __init__(self) -> None:
        self.log = LOGS / f"bench-{os.getpid()}.log"
        self._worker: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        LOGS.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmark.common.bench_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                preexec_fn=die_with_parent,
                text=True,
            )

    def run(self, server: Server, tokenizer: Path, load: Load) -> dict[str, Any]:
        """Run bench_serving once, and return its record without settings. Raises RuntimeError if a request failed."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.jsonl"
            status = self._ask(bench_args(server, tokenizer, load, output))
            result = json.loads(output.read_text().splitlines()[-1]) if status == "0" and output.exists() else {}
        if result.get("completed") != load.requests:
            self._stop()
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            answered = f"{result.get('completed', 0)} of {load.requests} requests answered"
            failure = f"bench_serving against {server.name}: status {status or 'none'}, {answered}"
            raise RuntimeError(f"{failure}; the end of {self.log}:\n{tail}")
        # JSON has no number for the request rate, which is infinite.
        return {key: value for key, value in result.items() if key not in ("server_info", "request_rate")}

    def _ask(self, args: list[str]) -> str:
        """Return the exit status of a run, empty if the worker has ended. An interrupted run ends the worker."""
        self._worker = worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(args) + "\n")
            worker.stdin.flush()
            return worker.stdout.readline().strip()
        except BrokenPipeError:
            return ""
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()  # the current run dies with it
            self._worker.wait()
            self._worker = None


CLIENT = Client()
