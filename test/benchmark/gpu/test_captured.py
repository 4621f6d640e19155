"""Both servers of a comparison capture the same decode graphs: what is padded for one is padded for the other."""

from pathlib import Path

import pytest

from benchmark.common import server as server_module
from benchmark.common.server import Server
from benchmark.gpu import eagle3, replay, serving
from benchmark.gpu.server import CASES

PAIRS = {name: case.variants for name, case in CASES.items()} | {
    "eagle3": tuple(eagle3.parse_variant(text) for text in eagle3.VARIANTS),
    "masking": tuple(replay.MASKING),
}


@pytest.fixture
def commands(monkeypatch):
    """The commands of servers that `serve_dummies` would start on a GPU."""
    monkeypatch.setattr(server_module, "has_gpu", lambda: True)
    monkeypatch.setattr(serving, "check_caches", lambda _: None)
    monkeypatch.setattr(serving, "write_model", lambda name: Path("model"))
    for name in ("start", "wait", "stop"):
        monkeypatch.setattr(Server, name, lambda self: None)

    def list_commands(variants):
        with serving.serve_dummies("qwen3-30b-a3b", variants) as servers:
            return [server.command for server in servers]

    return list_commands


def read_sizes(command):
    """The captured batch sizes; none where the command leaves them to the server."""
    if "--cuda-graph-bs-decode" not in command:
        return []
    values = command[command.index("--cuda-graph-bs-decode") + 1 :]
    end = next((n for n, value in enumerate(values) if value.startswith("--")), len(values))
    return [int(value) for value in values[:end]]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_captures_the_same_sizes(commands, name):
    off, on = map(read_sizes, commands(PAIRS[name]))
    assert off == on
    if name != "masking":  # which measures what upstream's own padding costs
        assert off[:18] == [*range(1, 17), 24, 32]


def test_what_a_variant_captures_is_its_own(commands):
    assert [read_sizes(one)[:3] for one in commands([*replay.LIVE.values()])] == [[8], [1, 2, 3], [8]]


def test_the_servers_of_the_other_verbs_too(monkeypatch):
    for gpu in (True, False):
        monkeypatch.setattr(server_module, "has_gpu", lambda gpu=gpu: gpu)
        sizes = [read_sizes(Server("model", args).command) for args in ([], ["--expert-policy", "xshare"])]
        assert sizes == [list(server_module.CAPTURED) if gpu else []] * 2
    monkeypatch.setattr(server_module, "has_gpu", lambda: True)
    assert read_sizes(Server("model", ["--cuda-graph-max-bs-decode", "4"]).command) == []
