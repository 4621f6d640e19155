"""`sglang-xshare top`: what a frame says of two looks, how it is drawn, and one line for whatever goes wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from live.fake import FakeServer
from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live import top as subcommand
from sglang_xshare.live.top import METRICS, Look, compare, read_gauges

METRICS_TEXT = """\
# HELP sglang:gen_throughput The generation throughput (token/s).
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{dp_rank="0",model_name="m",tp_rank="0"} 100.5
sglang:gen_throughput{dp_rank="0",model_name="m",tp_rank="1"} 100.5
sglang:gen_throughput{dp_rank="1",model_name="m",tp_rank="0"} 50.0
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{dp_rank="0",model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_length{dp_rank="1",model_name="m",tp_rank="0"} 3.5
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 7.0
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="0"} 9.0
"""


def layer(number: int, steps: int, before: int, after: int, kept: float, rows: int) -> dict[str, Any]:
    counts = {"layer_steps": steps, "experts_before": before, "experts_after": after, "rows": rows, "kept_mass": kept}
    return {"layer": number, **counts}


def answer(*layers: dict[str, Any], switches: int = 3) -> dict[str, Any]:
    since = {"layer_steps": 8, "mean_before": 14.5, "mean_after": 6.25, "mean_kept_mass": 0.875}
    return {
        "policy": "xshare",
        "in_force": {"policy": "xshare", "k0": 1, "add": 24, "mass": None, "overrides": []},
        "plan_hash": "0a1b2c3d",
        "counters": {"by_layer": [layer(number, 999, 9, 9, 9.0, 9) for number in range(len(layers))]},
        "since_switch": {**since, "outcomes": {"policy": 4, "prefill": 0}, "by_layer": list(layers)},
        "switches": switches,
    }


EARLIER = answer(layer(1, 4, 40, 20, 7.0, 8), layer(3, 4, 44, 24, 6.0, 8))
LATER = answer(layer(1, 6, 70, 30, 13.0, 16), layer(3, 4, 44, 24, 6.0, 8))


def load(number: int, *means: float | None) -> dict[str, Any]:
    """Of a layer what a frame tells; the rest is None."""
    names = ("before", "after", "kept_mass", "page_ins_before", "page_ins")
    return {"layer": number} | dict.fromkeys(names) | dict(zip(names, means, strict=False))


def at(time: float, told: dict[str, Any]) -> Look:
    return Look("http://h", told, read_gauges(METRICS_TEXT), time)


@pytest.fixture
def server(answering: Callable[[bytes], FakeServer]) -> FakeServer:
    server = answering(b"Not Found")
    server.answer = 404, b'{"detail": "Not Found"}'
    server.routes = {PATH: (200, json.dumps(LATER).encode()), METRICS: (200, METRICS_TEXT.encode())}
    return server


def test_a_frame_tells_what_happened_between_two_looks():
    frame = compare(at(12.5, LATER), at(10.0, EARLIER))
    assert frame["seconds"] == 2.5
    assert frame["layers"] == [load(1, 15.0, 5.0, 0.75), load(3)]
    assert (frame["tokens_per_second"], frame["accepted_length"]) == (150.5, 3.0)
    assert (frame["running"], frame["queued"]) == (16, 0)


def test_page_ins_are_told_where_experts_are_paged():
    told = answer(layer(1, 4, 40, 20, 7.0, 8) | {"page_ins_before": 30, "page_ins": 10}, layer(3, 0, 0, 0, 0.0, 0))
    told["since_switch"] |= {"mean_page_ins_before": 7.5, "mean_page_ins": 2.5}
    frame = compare(at(1.0, told), None)
    assert frame["layers"][0] == load(1, 10.0, 5.0, 0.875, 7.5, 2.5)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(subcommand.draw(frame, 8))
    assert "14.5 -> 6.2, page-ins 7.5 -> 2.5, kept mass" in shown.get()


@pytest.mark.parametrize(
    "before",
    [
        None,
        at(10.0, answer(layer(1, 99, 9, 9, 9.0, 9), LATER["since_switch"]["by_layer"][1])),
        at(10.0, answer(layer(1, 6, 9, 9, 9.0, 99), LATER["since_switch"]["by_layer"][1])),
        at(10.0, answer({**layer(1, 4, 40, 20, 7.0, 8), "page_ins": 3}, LATER["since_switch"]["by_layer"][1])),
        at(10.0, answer(layer(0, 4, 40, 20, 7.0, 8), LATER["since_switch"]["by_layer"][1])),
        at(10.0, EARLIER | {"switches": 2}),
    ],
    ids=["first", "restarted", "restarted with fewer rows", "restarted without pages", "another model", "switched"],
)
def test_the_first_frame_and_that_of_another_plan_are_of_all_since_it_is_in_force(before):
    frame = compare(at(12.0, LATER), before)
    assert frame["seconds"] is None
    assert frame["layers"] == [load(1, 70 / 6, 5.0, 13 / 16), load(3, 11.0, 6.0, 0.75)]


def test_once_draws_one_frame(server, capsys):
    assert main(["top", server.url, "--once", "--api-key", "secret"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "xshare, plan 0a1b2c3d",
        "k0=1, add=24",
        "switches: 3",
        "policy 4",
        "14.5 -> 6.2, kept mass 0.8750",
        "150.5 tokens/s",
    ):
        assert words in out
    assert "accepted length 3.00; 16 running, 0 queued" in out
    assert "mass=" not in out.replace("kept mass", "")
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("1", "11.7", "5.0", "0.8125"),
        ("3", "11.0", "6.0", "0.7500"),
    ]
    assert [(asked[1], asked[2]) for asked in server.asked] == [(PATH, "Bearer secret"), (METRICS, "Bearer secret")]


def test_json_is_a_line_a_frame(server, capsys):
    assert main(["top", server.url, "--once", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    frame = json.loads(line)
    unpaged = {"page_ins_before": None, "page_ins": None}
    assert frame["layers"][1] == {"layer": 3, "before": 11.0, "after": 6.0, "kept_mass": 0.75} | unpaged
    assert (frame["seconds"], frame["switches"], frame["in_force"]["add"]) == (None, 3, 24)


def test_it_looks_again_until_the_server_is_gone(server, capsys, monkeypatch):
    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        asked = len(server.asked)
        server.routes[PATH] = (200, json.dumps(LATER).encode()) if asked < 6 else (500, b"")

    server.routes[PATH] = 200, json.dumps(EARLIER).encode()
    monkeypatch.setattr(subcommand.time, "sleep", sleep)
    assert main(["top", server.url, "--interval", "0.5", "--json"]) == 1
    out, err = capsys.readouterr()
    frames = [json.loads(line) for line in out.splitlines()]
    assert [frame["seconds"] is None for frame in frames] == [True, False, False]
    assert [frame["layers"][0]["after"] for frame in frames] == [5.0, 5.0, None]
    assert err == f"top: {server.url}: 500 Internal Server Error\n"


def test_ctrl_c_ends_it(server, monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subcommand.time, "sleep", interrupt)
    assert main(["top", server.url]) == 0


@pytest.mark.parametrize(
    ("route", "told", "line"),
    [
        (PATH, (400, b'{"error": "started without an expert policy; allowed is"}'), "started without an expert policy"),
        (PATH, (401, b""), "401: no permission"),
        (PATH, (404, b""), "404: no such route"),
        (PATH, (200, b"{}"), "not an SGLang server with this package"),
        (PATH, (200, json.dumps(LATER | {"since_switch": {}}).encode()), "it tells nothing by layer"),
        (METRICS, (404, b""), "no /metrics"),
        (METRICS, (401, b""), "401: no permission"),
    ],
)
def test_what_goes_wrong_is_one_line(route, told, line, server, capsys):
    server.routes[route] = told
    assert main(["top", server.url, "--once"]) == 1
    assert read_refusal(capsys).startswith(f"top: {server.url}: {line}")


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "-inf", "1e9"])
def test_a_wrong_interval_is_one_line(interval, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["top", "http://h", f"--interval={interval}"])
    assert ended.value.code == 1
    assert read_refusal(capsys).startswith(f"top: --interval {interval}: ")
