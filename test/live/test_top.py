"""`sglang-xshare top`: what a frame says of two looks, how it is drawn, and one line for whatever goes wrong."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from live.fake import ANSWER, COUNTS
from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live import top as subcommand
from sglang_xshare.live.top import METRICS, Look, describe_depths, draw, read_gauges, subtract

METRICS_TEXT = """\
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{dp_rank="0",model_name="m",tp_rank="0"} 100.5
sglang:gen_throughput{dp_rank="0",model_name="m",tp_rank="1"} 0.0
sglang:gen_throughput{dp_rank="1",model_name="m",tp_rank="0"} 50.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{dp_rank="0",model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_length{dp_rank="1",model_name="m",tp_rank="0"} 3.5
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 7.0
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="0"} 9.0
"""


def layer(number: int, steps: int, before: int, after: int, kept: float, rows: int) -> dict[str, Any]:
    counts = {"layer_steps": steps, "experts_before": before, "experts_after": after, "rows": rows, "kept_mass": kept}
    return {"layer": number, **counts}


def answer(*layers: dict[str, Any]) -> dict[str, Any]:
    counters = {"by_layer": [layer(number, 999, 9, 9, 9.0, 9) for number in range(len(layers))]}
    in_force = ANSWER["in_force"] | {"mass": None}
    return ANSWER | {"in_force": in_force, "counters": counters, "since_switch": COUNTS | {"by_layer": [*layers]}}


FIRST, LAST = layer(1, 4, 40, 20, 7.0, 8), layer(3, 4, 44, 24, 6.0, 8)
EARLIER, LATER = answer(FIRST, LAST), answer(layer(1, 6, 70, 30, 13.0, 16), LAST)


def at(time: float, told: dict[str, Any]) -> Look:
    return Look(told, read_gauges(METRICS_TEXT), time)


def show(now: Look, before: Look | None) -> str:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(draw("http://h", now, before, 8))
    return shown.get()


@pytest.fixture
def server(answering):
    server = answering(b"")
    server.answer = 404, {"detail": "Not Found"}
    server.routes = {PATH: (200, LATER), METRICS: (200, METRICS_TEXT.encode())}
    return server


def test_draft_depths_are_a_line_by_batch_size():
    first = {"batch_size": 1, "depth": 5, "tokens": 2.306, "ms": 8.44}
    sizes = [first, {"batch_size": 16, "depth": 0, "tokens": 1.0, "ms": None}]
    line = "Draft depth by batch size: 1: 5 (2.31 tokens in 8.4 ms), 16: 0 (1.00 tokens in - ms)"
    assert describe_depths({"batch_sizes": sizes}) == line
    assert describe_depths({"batch_sizes": []}) == "Draft depth by batch size: -"
    assert line in show(at(12.0, LATER | {"draft_depth": {"batch_sizes": sizes}}), None)
    assert line not in show(at(12.0, LATER), None)


def test_a_server_without_a_policy_has_a_frame_of_its_draft_depths():
    size = {"batch_size": 4, "depth": 3, "tokens": 2.4, "ms": 12.5}
    told = {"policy": "vanilla", "in_force": {"policy": "vanilla"}, "draft_depth": {"batch_sizes": [size]}}
    lines = show(at(2.0, told), at(0.0, told)).splitlines()
    assert lines[0] == "http://h: vanilla"
    assert lines[1].startswith("150.5 tokens/s")
    assert lines[2:] == ["Draft depth by batch size: 4: 3 (2.40 tokens in 12.5 ms)"]


@pytest.mark.parametrize(
    "before",
    [
        answer(layer(1, 99, 9, 9, 9.0, 9), LAST),
        answer(layer(1, 6, 9, 9, 9.0, 99), LAST),
        answer({**FIRST, "page_ins": 3}, LAST),
        answer({**FIRST, "layer": 0}, LAST),
        answer(FIRST),
        EARLIER | {"switches": 2},
    ],
    ids=["restarted", "with fewer rows", "without pages", "another model", "fewer layers", "switched"],
)
def test_a_look_at_another_plan_or_server_is_no_earlier_one(before):
    assert subtract(at(12.0, LATER), at(10.0, before)) is None


def read_rows(out: str) -> list[list[str]]:
    """What stands in the table: layer, before, after, kept mass."""
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["3"])]
    return [[row[0], row[1], row[2], row[-1]] for row in rows]


def test_a_frame_is_of_what_happened_since_the_one_before():
    shown = show(at(12.5, LATER), at(10.0, EARLIER))
    assert "by layer, of the last 2.5 s:" in shown
    assert read_rows(shown) == [["1", "15.0", "5.0", "0.7500"], ["3", "-", "-", "-"]]
    shown = show(at(12.5, LATER), at(10.0, EARLIER | {"switches": 2}))
    assert "by layer, since the last switch:" in shown
    assert read_rows(shown) == [["1", "11.7", "5.0", "0.8125"], ["3", "11.0", "6.0", "0.7500"]]


def test_what_a_server_does_not_measure_is_a_dash():
    """As the accepted length without speculation; a replica that has verified nothing is in no mean."""
    shown = show(Look(LATER | {"switches": 0}, read_gauges(""), 1.0), None)
    assert "- tokens/s, accepted length -; 0 running, 0 queued" in shown
    assert "by layer, since the server's start:" in shown
    assert "accepted length 2.50;" in show(Look(LATER, read_gauges(METRICS_TEXT.replace("3.5", "0.0")), 1.0), None)


def test_page_ins_are_told_where_experts_are_paged():
    told = answer(FIRST)
    told["since_switch"] |= {"page_ins_before": 60, "page_ins": 20}
    assert "14.5 -> 6.2, page-ins: 7.5 -> 2.5, kept mass" in show(at(1.0, told), None)


def test_one_frame_where_stdout_is_no_terminal(server, capsys):
    assert main(["top", server.url, "--api-key", "secret"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "switches: 3; since the last: active experts: 14.5 -> 6.2, kept mass: 0.8750, policy steps: 2" in out
    assert "150.5 tokens/s, accepted length 3.00; 16 running, 0 queued" in out
    for words in ("xshare, plan 0a1b2c3d", "k0=1, add=24"):
        assert words in out
    assert "mass=" not in out
    assert read_rows(out) == [["1", "11.7", "5.0", "0.8125"], ["3", "11.0", "6.0", "0.7500"]]
    assert [(asked[1], asked[2]) for asked in server.asked] == [(PATH, "Bearer secret"), (METRICS, "Bearer secret")]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(subcommand, "open_console", lambda: Console(width=120, height=40, force_terminal=True))


def test_it_looks_again_until_the_server_is_gone(server, terminal, capsys, monkeypatch):
    slept = []

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        slept.append(seconds)
        server.routes[PATH] = (200, LATER) if len(server.asked) < 6 else (500, b"")

    server.routes[PATH] = 200, EARLIER
    monkeypatch.setattr(subcommand, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept)))
    assert main(["top", server.url, "--interval", "0.5"]) == 1
    out, err = capsys.readouterr()
    spans = [line.split("by layer, ")[1] for line in out.splitlines() if "by layer" in line]
    assert spans[:3] == ["since the last switch:", "of the last 0.5 s:", "of the last 0.5 s:"]
    assert err == f"top: {server.url}: 500 Internal Server Error\n"


def test_ctrl_c_ends_it(server, terminal, capsys, monkeypatch):
    monkeypatch.setattr(subcommand.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    assert main(["top", server.url]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("route", "told", "line"),
    [
        (PATH, (404, b""), "404: no such route"),
        (PATH, (200, LATER | {"since_switch": {}}), "the answer has no counts by layer"),
        (METRICS, (404, b""), "no /metrics"),
        (METRICS, (401, b""), "401: no permission"),
    ],
)
def test_what_goes_wrong_is_one_line(route, told, line, server, capsys):
    server.routes[route] = told
    assert main(["top", server.url]) == 1
    assert read_refusal(capsys).startswith(f"top: {server.url}: {line}")


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "-inf", "1e9"])
def test_a_wrong_interval_is_one_line(interval, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["top", "http://h", f"--interval={interval}"])
    assert ended.value.code == 1
    assert read_refusal(capsys).startswith(f"top: --interval {interval}: ")
