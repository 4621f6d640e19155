"""What the tests of `check` share: its command, here or in a process with a release, a model, and what it said."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from benchmark.common.comparison import Comparison
from benchmark.common.paths import ROOT
from benchmark.gpu.models import COMMON, CONFIGS, read_config
from served.release import make_env, run_script
from sglang_xshare.check.estimate import estimate_step
from sglang_xshare.check.weights import read_weights
from sglang_xshare.cli import main
from sglang_xshare.gpus import GPUS

TINY = ROOT / "checkpoints" / "qwen3-moe-tiny"
QWEN = COMMON | CONFIGS["qwen3-30b-a3b"]
H100 = GPUS["h100"].bandwidth * 1e9


def say(*arguments):
    """Run the command with these; returns its exit code, also where its parser refuses a value."""
    try:
        return main(["check", *map(str, arguments)])
    except SystemExit as ended:
        return ended.code


def pipe(text):
    """Return the path of a pipe that has this text. Other processes of this machine can read it, too."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return f"/proc/{os.getpid()}/fd/{reader}"


def compare(*policies):
    """The flags that compare them."""
    return [text for policy in policies for text in ("--compare", policy)]


def compare_step(point, requests, bandwidth, write):
    """Return a recorded server's (model, active experts, estimated ms, measured ms), each without and with a policy."""
    comparison = Comparison.read(point)
    off, on = comparison.summaries
    weights = read_weights(write(COMMON | read_config(comparison.workload.model.name)))
    top_k = weights.model.top_k  # what one request has active
    active = on.experts_before or top_k, on.experts_after or top_k
    estimated = [estimate_step(weights, experts, requests * 256, bandwidth)[1] * 1e3 for experts in active]
    return weights.model, active, estimated, (off.tpot_ms.median, on.tpot_ms.median)


def run_all(tree: Path, asked: list[list[str]], env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """What the command says to each list of arguments, asked in one process; a variable of no text is unset."""
    own = {name: value for name, value in (make_env(tree) | (env or {})).items() if value}
    return run_script(Path(__file__).with_name("check_flags.py"), own, asked)


WITHOUT = """
import json, sys
from importlib.abc import MetaPathFinder

absent = sys.argv.pop(1).split()

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from sglang_xshare.cli import main
code = main(["check", *sys.argv[1:]])
print(json.dumps([code, [name for name, module in sys.modules.items() if module is not None]]))
"""


def say_without(absent, *asked):
    """Run the command in a process in which the packages named in `absent` are not installed. Returns its exit code,
    output, errors by line, the modules that it has imported, and its seconds of processor time.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-c", WITHOUT, absent, *asked]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *out, last = done.stdout.splitlines()
    said = SimpleNamespace(out="\n".join(out), err=done.stderr.splitlines())
    said.code, said.modules = json.loads(last)
    said.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return said


def list_warnings(report: dict) -> list[str]:
    """The lines of ours, without SGLang's."""
    return [warning["says"] for warning in report["warnings"] if warning["by"] == "sglang-xshare"]
