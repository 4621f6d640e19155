"""The command that compares policies in the server: small and for real, and what it says of bad input."""

import pytest

from benchmark.common.command import one_line_errors
from benchmark.common.record import read_record
from benchmark.serving import __main__ as command
from benchmark.serving.report import KEY


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["vanilla", "vanilla"], "policies vanilla vanilla: each may be given once"),
        (["XShare"], "argument policies: policy 'XShare': allowed is NAME"),
        (["--model", "/nowhere"], "argument --model: /nowhere is no folder"),
        (["--output-tokens", "3", "--model", "."], "output tokens 3: allowed is at least 4"),
        (["--requests", "none"], "argument --requests: 'none': allowed is a whole number above 0"),
    ],
)
def test_bad_input_is_one_line(args, message):
    with pytest.raises(SystemExit) as stop, one_line_errors("serving"):
        command.main(args)
    assert message in str(stop.value.code)
    assert "\n" not in str(stop.value.code)


def test_the_generated_model_is_made_before_anything_is_served(tmp_path, monkeypatch):
    def make():
        raise OSError("disk full")

    monkeypatch.setattr(command, "make", make)
    monkeypatch.setattr(command, "serve", lambda *_: pytest.fail("served without a model"))
    with pytest.raises(OSError, match="disk full"):
        command.main(["vanilla", "--out", str(tmp_path)])


def test_one_round_for_real_and_nothing_more_when_it_is_resumed(tiny_model, tmp_path, capsys, monkeypatch):
    sizes = ["--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "4"]
    arguments = ["vanilla", "xshare:k0=1,add=8", "--model", str(tiny_model), *sizes, "--out", str(tmp_path)]
    command.main(arguments)
    record = read_record(tmp_path / "serving.json", "serving")
    vanilla, policy = record["points"][KEY]["series"]
    assert [len(one["results"]) for one in (vanilla, policy)] == [1, 1]
    assert policy["evidence"][0]["experts_after"] < policy["evidence"][0]["experts_before"]
    printed = capsys.readouterr().out
    assert "prove nothing" in " ".join(printed.split())
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    monkeypatch.setattr(command, "serve", lambda *_: pytest.fail("served again"))
    command.main([*arguments, "--resume"])
