"""What `check` makes of what SGLang says, of its faults and of ours, and of what is wrong before SGLang is asked."""

import logging
from types import SimpleNamespace

import pytest

from check.asking import TINY
from refused import read_refusal
from sglang_xshare.check.resolve import Resolution, _listening, _resolve
from sglang_xshare.check.server import read_flags
from sglang_xshare.cli import main

BAD = {
    "--gpu h101: ": ["--model", str(TINY), "--gpu", "h101"],
    "--model /nowhere/model: ": ["--model", "/nowhere/model"],
    "--model nobody/no-such-model: ": ["--model", "nobody/no-such-model"],
    "--model: missing": ["--tp", "2"],
    "--config /nowhere.yaml: ": ["--config", "/nowhere.yaml"],
    "--device cpu with --gpu: ": ["--model", str(TINY), "--gpu", "h100", "--device", "cpu"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_told_before_sglang_is_imported(line, monkeypatch, capsys):
    monkeypatch.setattr("sglang_xshare.check.command._judge", None)
    assert main(["check", *BAD[line]]) == 1
    assert read_refusal(capsys).startswith(f"check: {line}")


def test_a_configuration_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    texts = {"torn.yaml": "tp: [", "list.yaml": "- tp", "latin.yaml": "model: caf\xe9", "flags.txt": "tp: 2"}
    texts["deep.yaml"] = "[" * 5_000
    reasons = {
        "none.yaml": " (No such file or directory)",
        "torn.yaml": " (while parsing a flow node",
        "list.yaml": " (got a list)",
        "latin.yaml": " ('utf-8' codec can't decode",
        "flags.txt": "\n",
        "deep.yaml": " (maximum recursion depth exceeded",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    for name, reason in reasons.items():
        assert main(["check", "--config", str(tmp_path / name)]) == 1
        line = f"check: --config {tmp_path / name}: must be a YAML file of the server's flags, *.yaml"
        assert f"{read_refusal(capsys)}\n".startswith(line + reason)


def test_dates_of_a_configuration_file_are_text(tmp_path):
    file = tmp_path / "dated.yaml"
    file.write_text("revision: 2026-11-28\njson-model-override-args: {released: 2026-11-28}\n")
    flags = read_flags(["--config", str(file)])
    assert (flags.revision, flags.changes) == ("2026-11-28", {"released": "2026-11-28"})


def test_the_command_line_wins_over_a_configuration_file(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("tp: 2\nep-size: 2\nenable-dp-attention: true\nenable-paged-experts: false\n")
    flags = read_flags(["--config", str(file), "--tp", "4"])
    assert (flags.ranks, flags.ep_size, flags.dp_attention, flags.enable_paged_experts) == (4, 2, True, False)


READ = {  # data-parallel groups of attention, expert-parallel ranks, slots
    "--dp-size 4": (1, 1, None),
    "--dp-size 4 --enable-dp-attention": (4, 1, None),
    "--dp-size 4 --attn-dp-size 2": (2, 1, None),
    "--moe-a2a-backend deepep": (1, 8, None),
    "--paged-experts-num-resident 9": (1, 1, None),
    "--paged-experts-num-resident 9 --enable-paged-experts": (1, 1, 9),
}


@pytest.mark.parametrize("flags", READ)
def test_flags_that_another_flag_puts_to_use(flags):
    found = read_flags(["--tp", "8", *flags.split()])
    assert (found.dp_size, found.ep_size, found.slots) == READ[flags]


def test_warnings_are_told_without_colours():
    lines: list[tuple[str, str]] = []
    with _listening(lines):
        logging.getLogger("sglang.srt.server_args").warning("\033[1;33mDEPRECATED:\n --old\033[0m; use --new")
    assert lines == [("SGLang", "DEPRECATED: --old; use --new")]


def test_a_fault_of_ours_is_not_sglangs_refusal(monkeypatch):
    resolution = Resolution()
    monkeypatch.setattr("sglang_xshare.check.resolve.find_refusals", lambda *_: {}["ours"])
    with pytest.raises(KeyError):
        _resolve([], lambda flags: resolution.note_given(SimpleNamespace()), resolution)
    _resolve([], lambda flags: {}["theirs"], resolution)
    assert resolution.refusals == [("SGLang", "'theirs'")]
