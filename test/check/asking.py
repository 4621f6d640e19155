"""What the tests of `check` without SGLang share: its command, a model, and what it said."""

import json

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu.models import COMMON, CONFIGS
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
