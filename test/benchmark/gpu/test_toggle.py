"""One server with two sets of graphs: each switch takes the set of its policy, and both share static buffers."""

from types import SimpleNamespace

import pytest

from benchmark.gpu.toggle import Toggle, install
from sglang_xshare.stage.stage import LastSwitch


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
        self.decode_cuda_graph_runner = Graphs(self.model.forward())

    def init_cuda_graphs(self):
        self.init_decode_cuda_graph()


class Graphs(str):
    """The graphs of one capture, with their sizes."""

    capture_bs = (1, 2)


class Backend:
    buffers = 0

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.buffers += 1


def describe(runner):
    return runner.decode_cuda_graph_runner, runner.forward(), runner.model.forward()


def test_a_failed_capture_leaves_the_policy_in_force(monkeypatch):
    runner = Runner()
    monkeypatch.setattr(runner, "init_decode_cuda_graph", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Toggle(runner)
    assert describe(runner) == ("stage",) * 3


def test_a_switch_that_captures_again_replaces_both_sets(monkeypatch):
    """It is called as `Control.commit` calls it, and its answer has the seconds."""
    from sglang.srt.model_executor import model_runner

    from sglang_xshare.live import control

    runner, policies = Runner(), {"xshare": None, "oea": 1.5, "vanilla": None}

    def switch(reports, policy, last_switch, recaptures=True):
        if policies[policy] is not None:
            assert runner.model.forward is wrapped, "the stage is to see the capture"
            runner.init_decode_cuda_graph()
        reports.stage.in_force = SimpleNamespace(schedule=None if policy == "vanilla" else policy)
        return policies[policy]

    monkeypatch.setattr(model_runner, "ModelRunner", Runner)
    monkeypatch.setattr(Runner, "init_cuda_graphs", Runner.init_cuda_graphs)  # put back afterwards
    monkeypatch.setattr(control, "switch", switch)
    install()
    runner.init_cuda_graphs()
    assert describe(runner) == ("stage",) * 3, "it starts with the policy of its flags"
    served, captured = SimpleNamespace(stage=SimpleNamespace()), runner.attn_backend.buffers
    for policy, told in (("vanilla", "upstream"), ("oea", "stage"), ("vanilla", "upstream"), ("xshare", "stage")):
        before = runner.decode_cuda_graph_runner
        assert control.switch(served, policy, LastSwitch(3), True) == policies[policy]
        assert describe(runner) == (told,) * 3
        assert runner.decode_cuda_graph_runner is not before
    assert runner.attn_backend.buffers == captured + 1, "only a second capture shares buffers"
