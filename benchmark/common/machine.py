"""Where and with what a figure was measured: no figure is kept without it."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmark.common.paths import ROOT
from benchmark.common.server import has_gpu

PACKAGES = ("sglang", "sglang-xshare", "torch", "transformers", "triton")


def describe_machine() -> dict[str, Any]:
    """Date (UTC), hardware, versions and the commit of this checkout."""
    hardware = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") if has_gpu() else None,
    }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """None where the program is not installed: git, on a machine that was sent the files alone."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None
