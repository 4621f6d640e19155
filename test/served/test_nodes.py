"""Two nodes of one server, on loopback: tensor and expert parallel across them, and what is lost when one of them dies.
Nothing of ours depends on where a node is.
"""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import requests

from benchmark.common.server import free_port
from served.answers import LAYERS, SERVERS, make_server, read_all, read_lines, say_together
from served.load import wait_for
from served.ranks import TWO_CORES
from served.release import LATEST

pytestmark = pytest.mark.long
EXPERTS = 64


def make_nodes(model, tree, flags, scratch):
    """The two halves of a server, not started, each with probe and trace."""
    span, nodes = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"), []
    for node in ("0", "1"):
        (scratch / node).mkdir(parents=True)
        nodes.append(make_server(model, tree, (*flags, *span, "--node-rank", node), scratch / node, TWO_CORES))
    return nodes


@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_two_nodes_answer_as_one(tiny_model, prompts, patched_release, tmp_path, served, parallel):
    """Both halves select as one server does, the first reports for both, and the answers are one server's."""
    flags = SERVERS["xshare"] + (("--ep-size", "2") if parallel == "expert" else ())
    nodes = make_nodes(tiny_model, patched_release(LATEST), flags, tmp_path)
    (server, probe, _), (other, other_probe, other_trace) = nodes
    try:
        other.start()
        with server:
            tokens = [say_together(server, probe, prompts[:size]) for size in (16, 16, 1)]
            calls = [[call for call in read_lines(file) if call["mode"] == "DECODE"] for file in (probe, other_probe)]
            _, metrics = read_all(server, probe)
    finally:
        other.stop()
    assert tokens == served("xshare").tokens
    selected = [pair for pair in zip(*calls, strict=True) if pair[0]["rows"] > 1]
    if parallel == "tensor":
        assert all(call["active"] == of_other["active"] for call, of_other in selected)
        active = sum(call["after"] for call, _ in selected)
    else:
        half = EXPERTS // 2
        assert all(max(call["active"]) < half <= min(of_other["active"]) for call, of_other in selected)
        active = sum(call["after"] + of_other["after"] for call, of_other in selected)
    assert metrics["steps policy"] == len(selected) / LAYERS > 0
    assert metrics["experts_after_total"] == active
    assert read_lines(other_trace) == [], "the first rank reports for all"


def kill_a_node(nodes, prompt):
    """Kill the other half amid an answer: what the client got, and the status that the server ended with."""
    (server, _, _), (other, _, _) = nodes
    try:
        other.start()
        with server, ThreadPoolExecutor(1) as thread:
            server.generate([prompt], max_new_tokens=4)
            answer = thread.submit(server.generate, [prompt], max_new_tokens=1500, ignore_eos=True)
            sleep(1.0)
            assert not answer.done(), "the answer was over before"
            other.stop()
            wait_for(lambda: server.returncode() is not None)
            return type(answer.exception(timeout=30)).__name__, server.returncode()
    finally:
        other.stop()


def test_a_node_that_dies_costs_what_it_costs_upstream(tiny_model, prompts, patched_release, tmp_path):
    """The server ends, and every request that runs."""
    lost = {}
    for name in ("off", "xshare"):
        nodes = make_nodes(tiny_model, patched_release(LATEST), SERVERS[name], tmp_path / name)
        lost[name] = kill_a_node(nodes, prompts[0])
    assert lost["xshare"] == lost["off"]
    assert issubclass(getattr(requests.exceptions, lost["off"][0]), requests.ConnectionError)
