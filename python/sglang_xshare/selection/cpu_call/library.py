"""The compiled library: built by the first process that needs it, and found again by the content of its source."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
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
# No fused multiply-add, nor what $CXX may ask for: their bits are not torch's.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno")
SIGNATURES = {
    "select_experts": ([*[c_void_p] * 10, *[c_int32] * 5, *[c_void_p] * 7], c_int32),
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
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        if library.size_of_plan() != ctypes.sizeof(Plan):
            raise OSError("the compiler lays out a plan otherwise than selection/cpu_call/layout.py")
    except (OSError, AttributeError) as error:  # the latter of a library without our functions
        said = " ".join(str(error).split())
        logger.warning("Experts are selected in torch on this CPU, which takes longer: %s", said)
        return None
    return library


def build(flags: Sequence[str]) -> Path:
    """The library's path. It is built unless a whole one is there: a file cut short would end every process that loads
    it. Processes that build it at once do not meet: the last one's file stays. Raises OSError.
    """
    made_for = os.environ.get("CXX", ""), tuple(flags), platform.machine(), platform.libc_ver()
    digest = hashlib.sha256(repr(made_for).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    library = find_cache() / f"expert_selection_{digest.hexdigest()[:16]}.so"
    if not _is_whole(library):
        compiler = _find_compiler()
        library.parent.mkdir(parents=True, exist_ok=True)
        # Compiled elsewhere: what a killed compiler leaves is no part of the cache.
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, library.name)
            _run([*compiler, *flags, *map(str, sorted(SOURCE.glob("*.cpp"))), "-o", str(built)])
            if not built.exists():
                raise OSError(f"{compiler[0]}: wrote no library")
            _keep(built.read_bytes(), library)
    return library


def find_cache() -> Path:
    """Where torch keeps what it compiles. Raises OSError for a user without a home."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root, "sglang_xshare")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache_home.startswith("~"):
        raise OSError("this user has no home folder to build in; TORCH_EXTENSIONS_DIR names another")
    return Path(cache_home, "torch_extensions", "sglang_xshare")


def _find_compiler() -> list[str]:
    """$CXX, which may have arguments, or else the first there is. Raises OSError."""
    given = os.environ.get("CXX", "")
    try:
        named = [given] if shutil.which(given) else shlex.split(given)
    except ValueError as error:
        raise OSError(f"no C++ compiler: CXX is {given!r}: {error}") from None
    if named:
        if shutil.which(named[0]) is None:
            raise FileNotFoundError(f"no C++ compiler: CXX is {named[0]!r}, which is not on the path")
        return named
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise FileNotFoundError("no C++ compiler: neither g++ nor c++ is on the path, and CXX is not set")
    return [found]


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise OSError(f"{command[0]}: {said}")


def _keep(content: bytes, library: Path) -> None:
    """Write a library with the digest of its content behind it, where the loader does not look."""
    with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as file:
        try:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # others' too, as a compiler's own
            os.fsync(file.fileno())
            os.replace(file.name, library)
        except BaseException:
            os.unlink(file.name)
            raise


def _is_whole(library: Path) -> bool:
    """Whether a file is there, and as `_keep` has written it."""
    try:
        found = library.read_bytes() if library.is_file() else b""
    except OSError:  # built anew where the folder allows it
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(found[:-size]).digest() == found[-size:]
