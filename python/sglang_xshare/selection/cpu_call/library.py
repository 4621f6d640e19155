"""The compiled library: built by the first process that needs it, and found again by the content of its source."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from .layout import Plan

SWITCH = "SGLANG_XSHARE_CPU_KERNEL"
"""Set to 0, this environment variable leaves selection on a CPU to torch."""
SOURCE = Path(__file__).with_name("csrc")
# No fused multiply-add: its bits are not torch's.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
SIGNATURES = {
    "select_experts": ([*[c_void_p] * 10, *[c_int32] * 4, *[c_void_p] * 7], c_int32),
    "count_step": ([*[c_void_p] * 10, *[c_int32] * 4], None),
}

logger = logging.getLogger(__name__)


@cache
def load() -> Any:
    """The functions of SIGNATURES, built where no earlier process has; None, and a line in the log, where there is no
    compiler or it fails, and without that line where SGLANG_XSHARE_CPU_KERNEL=0.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        # Keeps the interpreter's lock, as it takes less time than handing it over may.
        library = ctypes.PyDLL(str(build(FLAGS)))
    except OSError as error:
        logger.warning("Experts are selected in torch on this CPU, which takes longer: %s", error)
        return None
    assert library.size_of_plan() == ctypes.sizeof(Plan), "csrc/plan.h and layout.py have different plans"
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def build(flags: Sequence[str]) -> Path:
    """The library's path. Processes that build it at once do not meet: the last one's file stays. Raises OSError."""
    named = (os.environ.get("CXX"), "g++", "c++")
    compiler = next((found for name in named if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: neither $CXX nor g++ nor c++ is on the path")
    version = _run([compiler, "--version"])
    digest = hashlib.sha256(repr((version, tuple(flags), platform.machine())).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    library = find_cache() / f"expert_selection_{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder, library.name)
            _run([compiler, *flags, *map(str, sorted(SOURCE.glob("*.cpp"))), "-o", str(built)])
            built.replace(library)
    return library


def find_cache() -> Path:
    """Where torch keeps what it compiles."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root, "sglang_xshare")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache_home, "torch_extensions", "sglang_xshare")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise OSError(f"{command[0]}: {said}")
    return done.stdout
