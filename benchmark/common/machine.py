"""A description of the machine and the software versions. Every record contains it."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmark.common.server import has_gpu
from benchmark.common.source import describe_commit

PACKAGES = ("sglang", "sglang-xshare", "torch", "transformers", "triton")
BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""CPU flags of bfloat16 arithmetic. CPUs of the same name can differ in these flags, which change the speed a lot."""


def describe_machine() -> dict[str, Any]:
    """Return the current date (UTC), the hardware, the package versions and the commit of this checkout."""
    hardware = {
        "cpu": _read_cpu("model name") or platform.machine(),
        "bfloat16": [flag for flag in BFLOAT16 if flag in _read_cpu("flags").split()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu_model() if has_gpu() else None,
    }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "commit": describe_commit(),
    }


def format_machine(described: Mapping[str, Any]) -> str:
    """Format the result of `describe_machine` as one line."""
    hardware, versions = described["hardware"], described["versions"]
    flags = f" ({', '.join(hardware['bfloat16']) or 'no bfloat16 arithmetic'})" if "bfloat16" in hardware else ""
    where = hardware["gpu"] or f"{hardware['cores']} cores of {hardware['cpu']}{flags}, no GPU"
    packages = ", ".join(f"{label} {versions[name]}" for name, label in (("sglang", "SGLang"), ("torch", "torch")))
    return f"{where}; {packages}; {described['date'][:10]}, commit {described['commit'] or 'unknown'}"


def _read_cpu(field: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo, or an empty string if the field is missing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _gpu_model() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
