"""On a CPU with a compiler, a layer's step is one compiled call; what a plan's first use has checked is not again."""

import pytest

from selection.test_triton_launch import Dispatched
from sglang_xshare import selection
from sglang_xshare.selection.cpu_call import load
from stage.fake import Model, forward_batch, run

pytestmark = pytest.mark.skipif(load() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("layers", [{}, {"1": {"policy": "vanilla"}}], ids=["all layers", "one vanilla"])
def test_a_layers_step_is_one_call(attach, monkeypatch, layers):
    """In torch there are its scores, and nothing else before the step is counted."""
    operations = {}
    for depth in (3, 6):
        model, calls = Model(depth), []
        installed = attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3, "layers": layers})
        run(model, "decode", 8)
        compiled = load().select_experts

        def note(*args, calls=calls, compiled=compiled):
            calls.append("select_experts")
            return compiled(*args)

        for layer in installed.layers:
            for call in layer._calls.values():
                monkeypatch.setattr(call, "_run", note)
        monkeypatch.setattr(selection, "_check_inputs", lambda *args, calls=calls: calls.append("check"))
        batch, totals = forward_batch("decode", 8), installed.counters.totals.clone()
        with Dispatched() as dispatched:
            model.forward(None, None, batch)
        selecting = depth - len(layers)
        assert calls == ["select_experts"] * selecting
        operations[depth] = [name for name in dispatched.operations if name != "_softmax"]
        assert len(dispatched.operations) - len(operations[depth]) == selecting
        assert (installed.counters.totals == 2 * totals).all()
    assert operations[3] == operations[6], "counting takes as many for any number of layers"


def test_a_router_that_sees_other_rows_than_the_step_is_refused_at_any_time(attach):
    model = Model(2)
    attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3})
    for _ in range(2):
        run(model, "decode", 8)
    with pytest.raises(RuntimeError, match="MoE layer 0: 8 router rows in a step of 6"):
        model.forward(None, None, forward_batch("decode", 6))
