"""An SGLang server in a process of its own: `with Server(model) as server: server.generate(["def f("])`."""

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests

from benchmark.common.paths import LOGS, RELEASES, ROOT

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

CPU_ARGS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--disable-cuda-graph": None,
    "--max-total-tokens": "32768",
}
# Several servers of small models share one GPU. Without a limit, the KV cache of each server takes 90 % of the free
# memory. The limit also bounds the buffers that SGLang 0.5.23 allocates after the graph capture. The MoE runner
# `triton` supports expert policies on every GPU.
GPU_ARGS: dict[str, str | None] = {"--max-total-tokens": "32768", "--moe-runner-backend": "triton"}
CAPTURED = (*range(1, 17), *range(24, 257, 8))
"""The batch sizes for which every GPU server captures CUDA graphs. They are the default under a policy in 0.5.23.

Without a policy, SGLang captures fewer sizes (1, 2, 4, 8, 12, 16, 24, ...) and pads the batches between them. Here all
servers capture the same sizes, so the comparison is fair. A server skips sizes above its maximum number of requests.
"""
SMALL = 4 << 30
"""The maximum size of a small model's weights, in bytes."""
COMMON_ARGS: dict[str, str | None] = {
    "--sleep-on-idle": None,  # otherwise an idle scheduler uses a whole core, which the measured server needs
    "--skip-server-warmup": None,  # the benchmarks warm up at the real batch size instead of with one request
}


class ServerError(RuntimeError):
    """An error of a server: it did not start, or a request failed.

    `returncode` is the server's exit status, or None if the server still runs. `log` is the text of the log.
    """

    def __init__(self, message: str, returncode: int | None, log: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.log = log


@cache
def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU. Return False if SGLANG_XSHARE_DEVICE is set to "cpu"."""
    if os.environ.get("SGLANG_XSHARE_DEVICE") == "cpu":
        return False
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def is_small(model: str | Path) -> bool:
    """Return whether `model` is a checkpoint folder with at most `SMALL` bytes of weights."""
    return 0 < sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) <= SMALL


def free_port() -> int:
    """Return a free loopback port below 32768. Linux assigns ports from 32768 on to outgoing connections."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def bind_ranks(ranks: int) -> dict[str, str]:
    """Return the environment variable that binds each rank to core 0 or 1. SGLang's CPU server requires it."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(ranks))}


class Server:
    """An SGLang server, started as `python -m sglang.launch_server` in a process session of its own.

    - `model`: the checkpoint folder.
    - `args`: command-line flags. They override the defaults above.
    - `release`: an SGLang version in build/releases, or a folder that contains `sglang/`. The default is the installed
      SGLang.
    - `env`: additional environment variables.
    - `name`: the name in progress lines. The log is build/logs/<name>-<port>.log.
    - `deadline`: the number of seconds within which the server must answer.
    - `program`: another Python module to run.

    Raises `ServerError` if the server exits during its start or does not answer in time.
    """

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        release: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "server",
        deadline: float = 240.0,
        program: str = "sglang.launch_server",
    ) -> None:
        self.name = name
        self.deadline = deadline
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        safe = re.sub(r"[^\w=.-]+", "-", name)[:80].strip("-")
        self.log = LOGS / f"{safe}-{self.port}.log"
        self.command = [sys.executable, "-m", program, "--model-path", str(model)]
        self.command += ["--port", str(self.port), *args]
        own = CPU_ARGS if not has_gpu() else GPU_ARGS if is_small(model) else {}
        for flag, value in (COMMON_ARGS | own).items():
            if flag not in args:
                self.command += [flag] if value is None else [flag, value]
        if has_gpu() and not any(arg.startswith("--cuda-graph-") for arg in args):
            self.command += ["--cuda-graph-bs-decode", *map(str, CAPTURED)]
        self.env = _environment(release) | dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._began = 0.0

    def __enter__(self) -> "Server":
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Launch the server and return at once, so that several servers can start at the same time."""
        LOGS.mkdir(parents=True, exist_ok=True)
        # A killed server does not remove its temporary files. So it gets its own TMPDIR, which `stop` removes.
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-xshare-")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env | {"TMPDIR": self._scratch.name},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait until the server answers. If the server does not answer in time, stop it and raise `ServerError`."""
        reported = 0.0
        try:
            while not self._answers():
                elapsed = time.monotonic() - self._began
                if self.returncode() is not None:
                    raise self._error(f"exited with status {self.returncode()} after {elapsed:.0f} s")
                if elapsed > self.deadline:
                    raise self._error(f"does not answer after {elapsed:.0f} s")
                if elapsed > reported + 10:
                    reported = elapsed
                    print(f"{self.name}: starting, {elapsed:.0f} s", flush=True)
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        print(f"{self.name}: ready after {time.monotonic() - self._began:.0f} s", flush=True)

    def stop(self) -> None:
        """Kill the server and all its processes. Do nothing if the server does not run."""
        if self._process is None or self._scratch is None:
            return
        family = self.processes()
        # SIGKILL is used because SGLang needs five seconds to shut down after SIGTERM. The server's worker processes
        # also die. Python's resource tracker then removes their files in /dev/shm.
        self._process.kill()
        self._process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()
        psutil.wait_procs(self.processes(), timeout=5)
        self._scratch.cleanup()
        self._process = self._scratch = None

    def processes(self) -> list[psutil.Process]:
        """Return all running processes of the server's session, including orphans."""
        if self._process is None:
            return []
        session = self._process.pid
        return [process for process in psutil.process_iter() if _session_of(process.pid) == session]

    def returncode(self) -> int | None:
        """Return the exit status, or None while the server runs."""
        return self._process.poll() if self._process else None

    def log_text(self) -> str:
        """Return the text of the server's log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str) -> Any:
        """Send a GET request and return the answer, either parsed JSON or text."""
        return self._read(requests.get(self.url + path, timeout=60))

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """Send a POST request with a JSON body and return the answer, either parsed JSON or text."""
        return self._read(requests.post(self.url + path, json=body, timeout=timeout))

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        request: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Send prompts as one batch to /generate and return the answers.

        A prompt is a text or a list of token ids. `request` contains additional fields of the request, for example
        `return_logprob`. `sampling` contains SGLang's sampling parameters, for example `max_new_tokens`. Sampling is
        greedy by default. Each answer contains `text`, `output_ids` and `meta_info`.
        """
        field = "text" if prompts and isinstance(prompts[0], str) else "input_ids"
        body = {field: list(prompts), "sampling_params": {"temperature": 0.0, **sampling}, **(request or {})}
        return self.post("/generate", body)

    def _answers(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=20).ok
        except requests.RequestException:
            return False

    def _read(self, response: requests.Response) -> Any:
        if not response.ok:
            raise self._error(
                f"{response.request.method} {response.url}: {response.status_code}: {response.text[:500]}"
            )
        if response.headers.get("content-type", "").startswith("application/json"):
            return response.json()
        return response.text

    def _error(self, what: str) -> ServerError:
        log = self.log_text()
        tail = "\n".join(log.splitlines()[-20:])
        return ServerError(f"{self.name} {what}; the end of {self.log}:\n{tail}", self.returncode(), log)


def _environment(release: str | Path | None) -> dict[str, str]:
    env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    env.setdefault("OMP_NUM_THREADS", "1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every start compiles the Python files of the release again
    if not has_gpu():
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        # With draft trees, SGLang compiles a small function with g++. A machine without a GPU may have no g++.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The checkout itself is on the path, because requests can use a logit processor from the benchmark package.
    path = [str(ROOT / "python"), str(ROOT), env.get("PYTHONPATH", "")]
    if release is not None:
        tree = RELEASES / release if isinstance(release, str) else release
        if not (tree / "sglang").is_dir():
            raise FileNotFoundError(
                f"release must have a folder sglang, which scripts/fetch_release.py makes (got {tree})"
            )
        path.insert(0, str(tree))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def die_with_parent() -> None:
    """Request that the kernel kills this process when its parent dies. Pass this function as `preexec_fn`."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
