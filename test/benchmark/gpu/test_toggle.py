"""One server with two sets of graphs: each switch takes the set of its policy, and both share static buffers."""

from types import SimpleNamespace

import pytest

from benchmark.gpu.toggle import Toggle


def forward(*args):
    return "upstream"


def wrapped(*args):
    return "stage"


vars(wrapped)["__wrapped__"] = forward


class Runner:
    """As upstream's: captures what its model's forward launches, on buffers that a second capture must not replace."""

    def __init__(self):
        self.attn_backend = Backend()
        self.model = SimpleNamespace(forward=wrapped)
        self.forward = wrapped
        self.init_decode_cuda_graph()

    def init_decode_cuda_graph(self):
        self.attn_backend.init_cuda_graph_state(16, 16)
        self.decode_cuda_graph_runner = self.model.forward()


class Backend:
    buffers = 0

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.buffers += 1


def describe(runner):
    return runner.decode_cuda_graph_runner, runner.forward(), runner.model.forward()


def test_a_switch_takes_graphs_and_forwards():
    runner = Runner()
    toggle = Toggle(runner)
    assert describe(runner) == ("stage",) * 3, "it starts with the policy of its flags"
    assert runner.attn_backend.buffers == 1
    toggle.take(selecting=False)
    assert describe(runner) == ("upstream",) * 3
    toggle.take(selecting=True)
    assert describe(runner) == ("stage",) * 3
    runner.attn_backend.init_cuda_graph_state(16, 16)
    assert runner.attn_backend.buffers == 2, "only the second capture shares buffers"


def test_a_failed_capture_leaves_the_policy_in_force(monkeypatch):
    runner = Runner()
    monkeypatch.setattr(runner, "init_decode_cuda_graph", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Toggle(runner)
    assert describe(runner) == ("stage",) * 3
