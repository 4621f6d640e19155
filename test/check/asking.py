"""What the tests of `check` share: its command, here or in a process with a release, a model, and what it said."""

import json
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu.models import COMMON, CONFIGS
from served.release import make_env, run_script
from sglang_xshare.cli import main
from sglang_xshare.gpus import GPUS

TINY = ROOT / "checkpoints" / "qwen3-moe-tiny"
QWEN = COMMON | CONFIGS["qwen3-30b-a3b"]
H100 = GPUS["h100"].bandwidth * 1e9


def say(*arguments):
    """Run the command with these; returns its exit code."""
    return main(["check", *map(str, arguments)])


def read_rows(capsys):
    """The estimates of what was said as JSON."""
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["estimate"]["estimates"]


def compare(*policies):
    """The flags that compare them."""
    return [text for policy in policies for text in ("--compare", policy)]


def ask(write, capsys, *more):
    """What is told of xshare on 32 requests, as JSON."""
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--json")
    assert say(*asked, *more, *compare("xshare:k0=1,add=24")) == 0
    return read_rows(capsys)


def run_all(tree: Path, asked: list[list[str]], env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """What the command says to each list of arguments, asked in one process; a variable of no text is unset."""
    own = {name: value for name, value in (make_env(tree) | (env or {})).items() if value}
    return run_script(Path(__file__).with_name("check_flags.py"), own, asked)


def list_warnings(report: dict) -> list[str]:
    """The lines of ours, without SGLang's."""
    return [warning["says"] for warning in report["warnings"] if warning["by"] == "sglang-xshare"]
