"""The compiled library. The first process builds the library, and later processes find it by a hash of its source."""

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
"""The environment variable that switches the compiled call off. With the value 0, torch selects experts on a CPU."""
SOURCE = Path(__file__).with_name("csrc")
# These flags switch off fused multiply-add, and fast math even if $CXX asks for it. Both would change bits of the
# results, which must equal the results of torch.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno")
SIGNATURES = {
    "select_experts": ([*[c_void_p] * 10, *[c_int32] * 5, *[c_void_p] * 7], c_int32),
    "count_step": ([*[c_void_p] * 10, *[c_int32] * 4], None),
}

logger = logging.getLogger(__name__)


@cache
def load() -> Any:
    """Return the library with the functions of SIGNATURES. Build the library if no earlier process has built it.

    If no compiler exists or the compiler fails, log a warning and return None. If SGLANG_XSHARE_CPU_KERNEL is 0, return
    None without a warning.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        # PyDLL keeps the interpreter's lock during a call, because releasing the lock may take longer than the call.
        library = ctypes.PyDLL(str(build(FLAGS)))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        if library.size_of_plan() != ctypes.sizeof(Plan):
            raise OSError("the compiler's layout of a plan differs from selection/cpu_call/layout.py")
    except (OSError, AttributeError) as error:  # AttributeError: a library without our functions
        said = " ".join(str(error).split())
        logger.warning("Experts are selected in torch on this CPU, which takes longer: %s", said)
        return None
    return library


def build(flags: Sequence[str]) -> Path:
    """Return the path of the library. Build the library if no complete file exists. Raises OSError.

    A truncated file would kill every process that loads it. Several processes may build at the same time; the last
    process replaces the file.
    """
    made_for = os.environ.get("CXX", ""), tuple(flags), platform.machine(), platform.libc_ver()
    digest = hashlib.sha256(repr(made_for).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    library = find_cache() / f"expert_selection_{digest.hexdigest()[:16]}.so"
    if not _is_whole(library):
        compiler = _find_compiler()
        library.parent.mkdir(parents=True, exist_ok=True)
        # The compiler writes to another folder, so a killed compiler leaves nothing in the cache.
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, library.name)
            _run([*compiler, *flags, *map(str, sorted(SOURCE.glob("*.cpp"))), "-o", str(built)])
            if not built.exists():
                raise OSError(f"{compiler[0]}: succeeded, but wrote no library")
            _keep(built.read_bytes(), library)
    return library


def find_cache() -> Path:
    """Return the folder of torch's compiled extensions. Raises OSError if the user has no home folder."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root, "sglang_xshare")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache_home.startswith("~"):
        raise OSError("this user has no home folder to build in; set TORCH_EXTENSIONS_DIR to a folder")
    return Path(cache_home, "torch_extensions", "sglang_xshare")


def _find_compiler() -> list[str]:
    """Return the command in $CXX, which may have arguments, or the first compiler on the path. Raises OSError."""
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
    """Write a library to its file, followed by a digest of its content. The loader ignores the digest."""
    with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as file:
        try:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # readable for all users, like the output of a compiler
            os.fsync(file.fileno())
            os.replace(file.name, library)
        except BaseException:
            os.unlink(file.name)
            raise


def _is_whole(library: Path) -> bool:
    """Return whether the file exists and is unchanged since `_keep` wrote it."""
    try:
        found = library.read_bytes() if library.is_file() else b""
    except OSError:  # an unreadable file is built again
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(found[:-size]).digest() == found[-size:]
