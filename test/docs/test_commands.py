"""Every command that a document shows is run, as `runs.py` says, in a shell of its own at the root of the checkout."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmark.common.paths import ROOT, TRAINED
from benchmark.common.server import Server, has_gpu
from docs.documents import Command, list_commands
from docs.kinds import Ask, Parse, Run, Same, Serve
from docs.runs import NO_GPU, RUNS
from programs import OF_AN_OUTER_MAKE, run_program
from served.release import LATEST
from sglang_xshare.compatibility.arguments import read_arguments

BIN = Path(sys.executable).parent
PROMPTS = ["Q: 55+74 A:", "def read(", "#include <", "The "]
FIRST = {command.text: command for command in reversed(list_commands())}
"""The commands by their text, each where it is first shown."""


def mark(kind: type) -> pytest.MarkDecorator:
    """Parameters for every documented command of a kind; those that take long are long tests."""
    commands = [
        pytest.param(FIRST[text], run, id=text, marks=[pytest.mark.long] if getattr(run, "is_long", False) else [])
        for text, run in RUNS.items()
        if isinstance(run, kind) and text in FIRST
    ]
    return pytest.mark.parametrize(("command", "run"), commands)


@pytest.fixture
def places(tmp_path: Path, pristine_release: Callable[[str], Path]) -> Callable[[str], str]:
    """Call it with a text to have its places filled in: `{scratch}`, `{tree}`, `{trace}`."""

    def fill(text: str) -> str:
        if "{tree}" in text and not (tmp_path / "tree").exists():
            # Links are enough: the engine moves new files into place and never writes into one.
            shutil.copytree(pristine_release(LATEST), tmp_path / "tree", copy_function=os.link)
        if "{trace}" in text:
            write_trace(tmp_path / "trace.jsonl")
        paths = {"{scratch}": tmp_path, "{tree}": tmp_path / "tree", "{trace}": tmp_path / "trace.jsonl"}
        return replace_words(text, {name: str(path) for name, path in paths.items() if name in text})

    return fill


@mark(Run)
def test_command(command: Command, run: Run, places: Callable[[str], str]) -> None:
    if run is NO_GPU and has_gpu():
        pytest.skip("this machine has a GPU, where the command measures for an hour and more")
    text = replace_words(command.text, run.replace)
    if text.startswith("make "):
        text = last_line_of_make(text)
    run_in_shell(command, places(f"{text} {run.more}"), run.status, run.shows)


@mark(Same)
def test_a_command_is_what_the_verb_runs(command: Command, run: Same) -> None:
    assert last_line_of_make(run.target).rpartition("/bin/")[2].split() == command.text.split()


@mark(Parse)
def test_flags_are_sglangs_and_ours(command: Command, run: Parse) -> None:
    from sglang.srt.server_args import ServerArgs

    program, subcommand, *flags = shlex.split(command.text)
    assert (program, subcommand) == ("sglang", "serve")
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    arguments = read_arguments(parser.parse_args(flags))
    assert arguments is not None
    assert arguments.schedule is not None


@mark(Serve)
def test_server(command: Command, run: Serve, places: Callable[[str], str]) -> None:
    if has_gpu():
        pytest.skip("this machine has a GPU: what the documents serve here is for machines without one")
    server = Server(TRAINED, name="documented", deadline=500)
    text = f"{replace_words(command.text, run.replace)} {run.more} --port {server.port}"
    server.command = ["bash", "-c", in_context(command, text)]
    server.env = make_env() | {"SGLANG_USE_CPU_ENGINE": "1"} if run.replace else make_env()
    with server:
        assert all(answer["text"] for answer in server.generate(PROMPTS, max_new_tokens=8, ignore_eos=True))
        for asked, ask in RUNS.items():
            if isinstance(ask, Ask) and ask.server == command.text:
                more = places(ask.more.replace("{port}", str(server.port)))
                line = asked.replace("localhost:30000", f"127.0.0.1:{server.port}")
                run_in_shell(FIRST[asked], f"{line} {more}", 0, ask.shows)
        if "--enable-metrics" in command.text:
            assert re.search(r'steps_total{.*outcome="(policy|observed)".*} [1-9]', server.get("/metrics"))


def run_in_shell(command: Command, text: str, status: int, shows: str) -> None:
    """Run a command where its document has it run, and check how it ends and what it prints."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # `make records` takes seven minutes where others use the two cores as well.
    more: dict[str, Any] = {"cwd": ROOT, "env": make_env(), "text": True, "timeout": 1500, **streams}
    done = subprocess.run(["bash", "-c", in_context(command, text)], **more)
    found = done.returncode, "Traceback" in done.stdout, re.search(shows, done.stdout) is not None
    assert found == (status, False, True), f"{text}\n{done.stdout[-3000:]}"


def in_context(command: Command, text: str) -> str:
    """The shell's text: what the lines above set, then the command, in the environment that runs this test."""
    return "\n".join([*command.context, text]).replace(".venv/bin/", f"{BIN}/")


def make_env() -> dict[str, str]:
    """The environment that runs this test, with this checkout's own package."""
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": path}


def replace_words(text: str, words: Mapping[str, str]) -> str:
    """The text with each of the words, which must be in it, replaced."""
    for old, new in words.items():
        assert old in text
        text = text.replace(old, new)
    return text


def last_line_of_make(text: str) -> str:
    """What a target of make runs itself, without what it needs first."""
    # With the outer one's flags it would print the folder it leaves last.
    done = run_program("bash", "-c", f"{text} --dry-run", cwd=ROOT, env={**OF_AN_OUTER_MAKE, "VENV": None})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def write_trace(file: Path) -> None:
    """A trace as `--expert-policy-trace` leaves it: two steps of two layers."""
    record = {"phase": "decode", "batch_size": 16, "experts_before": 55, "experts_after": 37, "kept_mass": 0.97}
    lines = [{"step": step, "layer": layer, **record} for step in range(2) for layer in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
