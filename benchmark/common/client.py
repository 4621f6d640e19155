"""A client that runs SGLang's unmodified bench_serving against a running server.

Importing bench_serving takes longer than most runs. So a worker process, `python -m benchmark.common.client`, imports
the module once and forks for every run. Each line of the worker's input is a JSON list of arguments for one run. The
forked process runs the module as `python -m sglang.benchmark.serving` does, but it prints to stderr. After each run the
worker writes one line with the exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.common.paths import LOGS, ROOT
from benchmark.common.server import Server, die_with_parent

if TYPE_CHECKING:
    from benchmark.common.rounds import Workload

MODULE = "sglang.benchmark.serving"
"""SGLang has announced that it will remove the older name, `sglang.bench_serving`."""


def bench_args(server: Server, workload: Workload, prompts: Path, output: Path) -> list[str]:
    """Return the command-line arguments of bench_serving for one run."""
    return [
        *("--backend", "sglang", "--base-url", server.url, "--model", str(workload.model), "--dataset-name", "custom"),
        *("--dataset-path", str(prompts), "--sharegpt-output-len", str(workload.output_tokens)),
        *("--num-prompts", str(workload.requests), "--max-concurrency", str(workload.concurrency)),
        # The caller has already warmed up the server. A warm-up request would take longer than some runs.
        *("--warmup-requests", "0", "--seed", str(workload.seed), "--disable-tqdm", "--output-file", str(output)),
        *("--temperature", str(workload.temperature)),
    ]


class Client:
    """A client that runs bench_serving in one worker process. The first run starts the worker."""

    def __init__(self) -> None:
        self.log = LOGS / f"bench-{os.getpid()}.log"
        self._worker: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        LOGS.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmark.common.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                preexec_fn=die_with_parent,
                text=True,
            )

    def run(self, server: Server, workload: Workload, prompts: Path) -> dict[str, Any]:
        """Run bench_serving once and return its results. Raises RuntimeError if a request failed."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.jsonl"
            status = self._ask(bench_args(server, workload, prompts, output))
            result = json.loads(output.read_text().splitlines()[-1]) if status == "0" and output.exists() else {}
        if result.get("completed") != workload.requests:
            self._stop()
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            answered = f"{result.get('completed', 0)} of {workload.requests} requests answered"
            failure = f"bench_serving against {server.name}: status {status or 'none'}, {answered}"
            raise RuntimeError(f"{failure}; the end of {self.log}:\n{tail}")
        # The request rate is infinite, and JSON cannot store infinity.
        return {key: value for key, value in result.items() if key not in ("server_info", "request_rate")}

    def _ask(self, args: list[str]) -> str:
        """Run bench_serving and return its exit status. Return an empty string if the worker process has died."""
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
            self._worker.kill()  # the forked process of the current run also dies
            self._worker.wait()
            self._worker = None


CLIENT = Client()


def work() -> None:
    """Run bench_serving for each line of the input until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    importlib.import_module(MODULE)  # so that the forked processes need not import it
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            die_with_parent()
            sys.argv = [MODULE, *json.loads(line)]
            runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
            sys.stdout.flush()
            os._exit(0)  # a normal exit takes seconds, because Python cleans up all imported modules
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=answers, flush=True)


if __name__ == "__main__":
    work()
