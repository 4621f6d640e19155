"""Command lines: a record of what was asked for, and one line for bad input."""

import pytest

from benchmark.common.command import Parser, folder, one_line_errors, policy
from benchmark.common.record import read_record


@pytest.fixture
def parser(tmp_path):
    parser = Parser("benchmark.made_up", "Made up.")
    parser.add_argument("policies", nargs="*", type=policy, default=("vanilla",))
    parser.add_argument("--model", type=folder)
    parser.add_counts(rounds=2)
    parser.add_numbers("batch", (4, 8), "requests of a step")
    parser.add_record(tmp_path)
    return parser


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["XShare"], "argument policies: policy 'XShare':"),
        (["--model", "/nowhere"], "argument --model: must be an existing folder (got /nowhere)"),
        (["--rounds", "0"], "argument --rounds: must be a whole number above 0 (got '0')"),
        (["--batch", "4", "x"], "argument --batch: must be a whole number above 0 (got 'x')"),
    ],
)
def test_bad_input_is_one_line_and_status_1(parser, args, message):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(args)
    assert str(stop.value.code).startswith(f"python -m benchmark.made_up: {message}")
    assert "\n" not in str(stop.value.code)


def test_a_record_holds_what_was_asked_for_and_is_replaced_unless_resumed(parser, tmp_path):
    def run(*argv):
        return parser.open_record("made-up", parser.parse_args(argv), argv)

    argv = ["xshare:k0=1", "--model", str(tmp_path), "--rounds", "3"]
    run(*argv).add("first", value=1)
    record = read_record(tmp_path / "made-up.json", "made-up")
    assert record["sessions"][0]["command"] == ["python", "-m", "benchmark.made_up", *argv]
    counts = {"rounds": 3, "requests": 32, "concurrency": 16, "input_tokens": 8, "output_tokens": 32}
    assert record["arguments"] == {"policies": ["xshare:k0=1"], "model": str(tmp_path), "batch": [4, 8]} | counts
    assert list(run(*argv, "--resume").points) == ["first"]
    with pytest.raises(ValueError, match=r"made-up\.json: rounds must be 3, as recorded \(got 5\)"):
        run(*argv[:-1], "5", "--resume")
    run(*argv[:-1], "5").add("second", value=2)
    assert list(run(*argv[:-1], "5", "--resume").points) == ["second"]


def test_an_interrupted_benchmark_ends_with_130(capsys):
    with pytest.raises(SystemExit, match=r"^130$"), one_line_errors("made-up"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "made-up: interrupted; every server is stopped\n"
