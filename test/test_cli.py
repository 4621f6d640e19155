"""The command line: what would have no effect is refused in one line, and Ctrl-C ends every subcommand alike."""

import os
import subprocess
import sys

import pytest

from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.console import PIPED, open_console


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 1
    line = read_refusal(capsys)
    assert line.startswith("sglang-xshare: a command must be given, one of ")
    named = line.strip().partition("one of ")[2].split(", ")
    assert {"patch", "policies", "policy", "top", "tune", "check", "calibrate"} <= set(named)
    for command in named:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        capsys.readouterr()


def test_a_flag_of_policies_without_effect_is_refused(capsys):
    assert main(["policies", "--speculative-num-draft-tokens", "4"]) == 1
    assert read_refusal(capsys).startswith("policies: --speculative-num-draft-tokens 4: ")
    assert main(["policies", "oea", "--show", "xshare"]) == 1
    assert read_refusal(capsys).startswith("policies: --show xshare oea: ")


@pytest.mark.parametrize(("columns", "width"), [("200", 200), ("", PIPED), ("0", PIPED), ("wide", PIPED)])
def test_output_into_a_pipe_is_as_wide_as_columns_says(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == width


@pytest.mark.parametrize(
    ("words", "interrupted"),
    [
        (["check", "--model", "DIR"], "check.command.check"),
        (["policies"], "policies.table.print_table"),
        (["policy", "get", "http://h"], "live.client.Client.get_policy"),
        (["patch", "status"], "patching.cli.describe"),
    ],
)
def test_ctrl_c_leaves_no_traceback(words, interrupted, monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"sglang_xshare.{interrupted}", interrupt)
    assert main(words) == 130
    line = "patch status: interrupted; nothing changed\n" if words[0] == "patch" else ""
    assert capsys.readouterr() == ("", line)


def test_ctrl_c_while_python_imports_the_commands_is_one_line(tmp_path):
    (tmp_path / "rich.py").write_text("raise KeyboardInterrupt")  # what the commands import
    command = [sys.executable, "-m", "sglang_xshare", "patch", "apply"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sglang-xshare: interrupted; nothing changed\n")


def test_a_policy_of_verification_alone_is_refused_by_the_flags_of_policies(capsys):
    policy = "moe-spec:budget=32"
    assert main(["policies", "--show", policy]) == 1
    line = read_refusal(capsys)
    assert line.startswith(f"policies: --expert-policy {policy}: ")
    assert "--speculative-num-draft-tokens" in line
    assert main(["policies", "--show", policy, "--speculative-num-draft-tokens", "4"]) == 0


def test_a_closed_stdout_is_no_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["policies", "xshare"]) == 0
