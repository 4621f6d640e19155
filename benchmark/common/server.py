"""A real SGLang server that is always stopped: `with Server(model) as server: server.generate(["def f("])`."""

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
# Servers of small models share a GPU: without a limit, the cache of each takes nine tenths of the free memory. The
# limit also bounds the buffers that 0.5.23 sizes after capture. The runner selects on every GPU.
GPU_ARGS: dict[str, str | None] = {"--max-total-tokens": "32768", "--moe-runner-backend": "triton"}
CAPTURED = (*range(1, 17), *range(24, 257, 8))
"""Captured batch sizes of every server on a GPU: those that 0.5.23 captures by default under a policy.

Without a policy upstream captures 1, 2, 4, 8, 12, 16, 24, ..., and pads batches between them: a policy would be
compared with a server of fewer graphs. A server omits sizes above its most requests.
"""
SMALL = 4 << 30
"""Bytes of weights up to which a model is small."""
COMMON_ARGS: dict[str, str | None] = {
    "--sleep-on-idle": None,  # otherwise the scheduler spins, and takes a core from the measured server
    "--skip-server-warmup": None,  # a single request; the benchmarks warm up at the real batch size
}


class ServerError(RuntimeError):
    """A server that did not start, or a failed request: the exit status, None without, and the log."""

    def __init__(self, message: str, returncode: int | None, log: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.log = log


@cache
def has_gpu() -> bool:
    """Return whether an NVIDIA driver answers here, and SGLANG_XSHARE_DEVICE=cpu does not forbid its use."""
    if os.environ.get("SGLANG_XSHARE_DEVICE") == "cpu":
        return False
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def is_small(model: str | Path) -> bool:
    """Return whether `model` is the folder of a checkpoint with at most `SMALL` bytes of weights."""
    return 0 < sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) <= SMALL


def free_port() -> int:
    """Return a free loopback port below 32768, the first port that Linux assigns to connections."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def bind_ranks(ranks: int) -> dict[str, str]:
    """Return the environment that gives each rank a core, which SGLang's CPU server needs; ranks share two cores."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(ranks))}


class Server:
    """`python -m sglang.launch_server`, or another `program`, in a session of its own, which ends with the server.

    `model` is the checkpoint's folder. `args` replace the defaults above. `release` is an SGLang version unpacked in
    build/releases, or any folder that contains `sglang/`; by default the installed one. Progress lines and the log,
    build/logs/<name>-<port>.log, have the `name`. The server must answer within `deadline` seconds.

    Starting raises `ServerError` if the server exits or the deadline passes.
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
        """Launch the server and return at once, so several can start side by side."""
        LOGS.mkdir(parents=True, exist_ok=True)
        # A killed server does not remove its temporary files, such as prometheus's; `stop` removes the TMPDIR.
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
        """Return when the server answers; stop it and raise if it does not."""
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
        """Kill the server and all processes that it started, if it runs."""
        if self._process is None or self._scratch is None:
            return
        family = self.processes()
        # The workers die with the server, and multiprocessing's resource tracker unlinks their files in /dev/shm;
        # upstream's own shutdown on SIGTERM takes five seconds.
        self._process.kill()
        self._process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()
        psutil.wait_procs(self.processes(), timeout=5)
        self._scratch.cleanup()
        self._process = self._scratch = None

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the server's session, orphans included."""
        if self._process is None:
            return []
        session = self._process.pid
        return [process for process in psutil.process_iter() if _session_of(process.pid) == session]

    def returncode(self) -> int | None:
        """Return the exit status; None while the server runs."""
        return self._process.poll() if self._process else None

    def log_text(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str) -> Any:
        """Return the answer to GET `path`: parsed JSON, or text."""
        return self._read(requests.get(self.url + path, timeout=60))

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """Return the answer to POST `path` with `body` as JSON: parsed JSON, or text."""
        return self._read(requests.post(self.url + path, json=body, timeout=timeout))

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        request: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Return the answers to prompts, texts or token ids, sent as one concurrent batch, by default greedy.

        `request` are further fields of upstream's /generate request, such as `return_logprob`, `sampling` upstream's
        sampling parameters, such as `max_new_tokens`. An answer has `text`, `output_ids` and `meta_info`.
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
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every start compiles an unpacked release
    if not has_gpu():
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        # Draft trees compile a small function with g++, which a machine without a GPU may lack.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The checkout itself is on the path, because a request may name a logit processor of the benchmarks.
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
    """Arrange that the kernel kills this process when its parent dies; for a `preexec_fn`."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
