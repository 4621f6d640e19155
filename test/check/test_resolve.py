"""`check` reports the answers and the errors of SGLang, its own errors, and flags from a file."""

import logging
from types import SimpleNamespace

import pytest

from check.asking import say
from compatibility.configured import server
from refused import read_refusal
from sglang_xshare.check.resolve import Resolution, _listening, _resolve
from sglang_xshare.check.server import read_flags


def test_a_configuration_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    wrong = {
        "none.yaml": (None, " (No such file or directory)"),
        "torn.yaml": ("tp: [", " (while parsing a flow node"),
        "list.yaml": ("- tp", " (got a list)"),
        "latin.yaml": ("model: caf\xe9", " ('utf-8' codec can't decode"),
        "flags.txt": ("tp: 2", "\n"),
        "deep.yaml": ("[" * 5_000, " (maximum recursion depth exceeded"),
    }
    for name, (text, reason) in wrong.items():
        if text is not None:
            (tmp_path / name).write_bytes(text.encode("latin-1"))
        assert say("--config", tmp_path / name) == 1
        line = f"check: --config {tmp_path / name}: must be a YAML file of the server's flags, *.yaml"
        assert f"{read_refusal(capsys)}\n".startswith(line + reason)
    assert say("--config=server.yaml") == 1
    assert read_refusal(capsys).startswith("check: --config=server.yaml: must be spelled --config FILE, ")


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
    "--attention-data-parallel-size 2": (2, 1, None),
    "--moe-a2a-backend deepep": (1, 8, None),
    "--paged-experts-num-resident 9": (1, 1, None),
    "--paged-experts-num-resident 9 --enable-paged-experts": (1, 1, 9),
}


def test_flags_that_another_flag_puts_to_use():
    found = {flags: read_flags(["--tp", "8", *flags.split()]) for flags in READ}
    assert {flags: (one.dp_size, one.ep_size, one.slots) for flags, one in found.items()} == READ


@pytest.mark.parametrize("hidden", [False, True])
def test_a_server_that_returns_aux_hidden_states_drafts_nothing(hidden):
    """SGLang resolves its algorithm to None, and keeps the number of draft tokens."""
    drafts = ["--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "4"]
    flags = read_flags([*drafts, *["--enable-return-aux-hidden-states"] * hidden])
    assert (flags.speculative_algorithm, flags.draft_tokens) == ((None, 1) if hidden else ("EAGLE3", 4))
    draws = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4, "mem_fraction_static": 0.9}
    flags.resolve(server(**draws, enable_return_aux_hidden_states=hidden))
    assert flags.draft_tokens == (1 if hidden else 4)


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
