"""A real SGLang server, started and surely stopped: `with Server(model) as server: server.generate(["def f("])`."""

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
# Of small models, whose servers share a GPU side by side: without a limit, each would take nine tenths of the memory it
# finds for its cache. The limit holds for what 0.5.23 sizes after capture, too. The runner selects on every GPU.
GPU_ARGS: dict[str, str | None] = {"--max-total-tokens": "32768", "--moe-runner-backend": "triton"}
CAPTURED = (*range(1, 17), *range(24, 257, 8))
"""Batch sizes of the decode graphs of every server on a GPU: those that 0.5.23 captures by default under a policy.
Without a policy upstream captures 1, 2, 4, 8, 12, 16, 24, ..., and pads what is between: a policy would be compared
with a server of fewer graphs. A server leaves out what is above its most requests.
"""
SMALL = 4 << 30
"""Bytes of weights up to which a model is small."""
COMMON_ARGS: dict[str, str | None] = {
    "--sleep-on-idle": None,  # the scheduler spins otherwise, and takes a core from the server that is measured
    "--skip-server-warmup": None,  # one request of upstream's; whoever measures warms up at the real batch size
}


class ServerError(RuntimeError):
    """The server did not come up, or a request failed; its exit status, None without, and what it printed."""

    def __init__(self, message: str, returncode: int | None, log: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.log = log


@cache
def has_gpu() -> bool:
    """Whether an NVIDIA driver answers here, and SGLANG_XSHARE_DEVICE=cpu does not forbid its use."""
    if os.environ.get("SGLANG_XSHARE_DEVICE") == "cpu":
        return False
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def is_small(model: str | Path) -> bool:
    """Whether it is the folder of a checkpoint whose weights are few."""
    return 0 < sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) <= SMALL


def free_port() -> int:
    """A loopback TCP port without listener, below 32768, where Linux gives none to connections until it is bound."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`python -m sglang.launch_server`, or another `program`, in a session of its own, of which nothing is left.

    `model` is the checkpoint's folder. `args` win over the defaults above. `release` is an SGLang version unpacked in
    build/releases, or any folder that contains `sglang/`; the installed one without. `name` is for progress lines and,
    as far as a file's name may hold it, for the log, build/logs/<name>-<port>.log. `deadline` is in seconds until the
    server must answer.

    Starting raises `ServerError` when the server exits or the deadline passes.
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
        """Launch it and return at once, so that several can start side by side."""
        LOGS.mkdir(parents=True, exist_ok=True)
        # A killed server leaves its temporary files (prometheus's, for one); its own TMPDIR goes when it goes.
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
        """Return when it answers; stop it and raise if it does not."""
        told = 0.0
        try:
            while not self._answers():
                elapsed = time.monotonic() - self._began
                if self.returncode() is not None:
                    raise self._error(f"exited with status {self.returncode()} after {elapsed:.0f} s")
                if elapsed > self.deadline:
                    raise self._error(f"does not answer after {elapsed:.0f} s")
                if elapsed > told + 10:
                    told = elapsed
                    print(f"{self.name}: starting, {elapsed:.0f} s", flush=True)
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        print(f"{self.name}: ready after {time.monotonic() - self._began:.0f} s", flush=True)

    def stop(self) -> None:
        """Kill it and everything it started; nothing to do if it is stopped."""
        if self._process is None or self._scratch is None:
            return
        family = self.processes()
        # Its workers die with it, and multiprocessing's resource tracker lives just long enough to unlink what they
        # left in /dev/shm; upstream's own shutdown on SIGTERM would take five seconds.
        self._process.kill()
        self._process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()
        psutil.wait_procs(self.processes(), timeout=5)
        self._scratch.cleanup()
        self._process = self._scratch = None

    def processes(self) -> list[psutil.Process]:
        """Every living process of its session, orphans included."""
        if self._process is None:
            return []
        session = self._process.pid
        return [process for process in psutil.process_iter() if _session_of(process.pid) == session]

    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def log_text(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str) -> Any:
        """GET `path`: the parsed JSON, or the text of any other answer."""
        return self._read(requests.get(self.url + path, timeout=60))

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """POST `body` as JSON to `path`: the parsed JSON, or the text of any other answer."""
        return self._read(requests.post(self.url + path, json=body, timeout=timeout))

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        request: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Generate for all prompts (texts or token ids) as one concurrent batch, greedily unless told otherwise.

        `request` are further fields of upstream's /generate request, such as `return_logprob`, `sampling` upstream's
        sampling parameters, such as `max_new_tokens`. Returns one answer a prompt, with `text`, `output_ids` and
        `meta_info`.
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
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an unpacked release would be compiled at every start
    if not has_gpu():
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        # Draft trees would compile a small function with g++, which a machine without a GPU may lack.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    # The checkout itself as well: a request may name a logit processor of our benchmarks.
    path = [str(ROOT / "python"), str(ROOT), env.get("PYTHONPATH", "")]
    if release is not None:
        tree = RELEASES / release if isinstance(release, str) else release
        if not (tree / "sglang").is_dir():
            raise FileNotFoundError(
                f"release {release}: {tree} has no folder sglang; scripts/fetch_release.py makes it"
            )
        path.insert(0, str(tree))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def die_with_parent() -> None:
    """Have this process killed when the one that started it dies, in whatever way; for a `preexec_fn`."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
