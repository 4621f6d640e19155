"""Two machines, played by two servers on this one: tensor parallel across them, and a refusal that ends both."""

import pytest

from benchmark.common.server import Server, ServerError, free_port
from served.answers import LAYERS, SERVERS, generate_together, make_server, read_lines, read_metrics, read_prompts
from served.release import LATEST
from served.test_parallel import TWO_CORES

pytestmark = pytest.mark.long


def span(node: int, address: str) -> tuple[str, ...]:
    """The flags of one of two nodes."""
    return "--tp", "2", "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", address


def test_two_nodes_answer_as_one(tiny_model, patched_release, tmp_path, served):
    tree, address = patched_release(LATEST), f"127.0.0.1:{free_port()}"
    nodes = []
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
        flags = (*SERVERS["xshare"], *span(node, address))
        nodes.append(make_server(tiny_model, tree, flags, tmp_path / str(node), TWO_CORES))
    (server, probe, _), (other, other_probe, other_trace) = nodes
    prompts = read_prompts(tiny_model)
    try:
        other.start()
        with server:
            answers = [generate_together(server, probe, prompts[:size]) for size in (16, 16, 1)]
            calls = [[call for call in read_lines(file) if call["mode"] == "DECODE"] for file in (probe, other_probe)]
            metrics = read_metrics(server, sum(call["layer"] == 0 for call in read_lines(probe)))
    finally:
        other.stop()
    assert [[answer["output_ids"] for answer in batch] for batch in answers] == served("xshare").tokens
    assert [call["awake"] for call in calls[0]] == [call["awake"] for call in calls[1]]
    selected = [call for call in calls[0] if call["rows"] > 1]
    assert metrics["steps policy"] == len(selected) / LAYERS > 0
    assert metrics["experts_after_total"] == sum(call["after"] for call in selected)
    assert read_lines(other_trace) == [], "the first rank reports for all"


def test_a_refusal_ends_both_nodes(tiny_model, patched_release):
    """Each reads the same flags, and refuses before it waits for the other."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--expert-policy", "xshare", "--enable-two-batch-overlap")
    nodes = [Server(tiny_model, [*flags, *span(node, address)], release=patched_release(LATEST)) for node in (0, 1)]
    line = "--enable-two-batch-overlap on: cannot be served with an expert policy: the router sees half a batch"
    for node in nodes:
        node.start()
    for node in nodes:
        with pytest.raises(ServerError, match="exited with status 1 ") as stopped:
            node.wait()
        assert stopped.value.log.count(line) == 1
        assert "Traceback" not in stopped.value.log
        assert "Load weight" not in stopped.value.log
