"""A step is counted in one launch, or in one call on a CPU: exactly as plain torch counts it, with nothing else."""

import functools

import pytest
import torch

from selection.interpreter import interpreted
from selection.test_triton import DEVICE
from selection.test_triton_launch import Dispatched, Kernel, kernel
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, selection
from sglang_xshare.selection.cpu_call import load
from sglang_xshare.stage.evidence import counting
from sglang_xshare.stage.evidence.metrics import OUTCOMES, Counters
from sglang_xshare.stage.step import Step
from stage.counted import count_outcomes, count_steps
from stage.fake import Model, forward_batch, run

__all__ = ["kernel"]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU: the tests of serving count on it")
PLANS = {
    "xshare": [build_plan("xshare", k0=1, add=3), build_plan("pruned", k0=1)],
    "a vanilla layer": [None, build_plan("xshare", k0=1, add=3), None],
    "rescued rows": [build_plan("moe-spec", budget=1, coverage="truncate")] * 2,
}


COMPILED = pytest.mark.skipif(load() is None, reason="no C++ compiler here, or SGLANG_XSHARE_CPU_KERNEL=0")


@pytest.fixture(scope="module")
def interpreter():
    with interpreted() as run:
        yield run


def call_compiled(function, *args, **keys):
    """In this process, whose CPU counts in one call."""
    return function(*args, **keys, one_launch=False)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("slots", [RunnerSlots(), RunnerSlots(masked=True)], ids=["slots", "masked"])
@pytest.mark.parametrize("plans", PLANS)
def test_a_step_is_counted_as_in_torch(interpreter, plans, slots, backend):
    """Steps of several sizes, with padding and exact rows and without; one in which no row lives counts as none."""
    check_counts(interpreter, PLANS[plans], slots, backend)


@pytest.mark.parametrize("plans", ["xshare", "a vanilla layer"])
def test_page_ins_are_counted_as_in_torch(interpreter, plans):
    check_page_ins(interpreter, PLANS[plans])


@COMPILED
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("plans", PLANS)
def test_a_cpus_step_is_counted_as_in_torch(plans, backend):
    check_counts(call_compiled, PLANS[plans], RunnerSlots(), backend)


@COMPILED
@pytest.mark.parametrize("plans", ["xshare", "a vanilla layer"])
def test_a_cpus_page_ins_are_counted_as_in_torch(plans):
    check_page_ins(call_compiled, PLANS[plans], "cpu")


def check_page_ins(interpreter, plans, backend="triton"):
    loaded = torch.rand(len(plans), 24, generator=torch.Generator().manual_seed(1)) < 0.4
    totals = check_counts(interpreter, plans, RunnerSlots(), backend, loaded=loaded, num_slots=5)
    selecting = [plan is not None for plan in plans]
    assert [bool(row.all()) for row in totals[:, 7:9]] == selecting
    # Of every second layer it was ruled out.
    assert [bool(count) for count in totals[:, 9]] == [one and layer % 2 == 0 for layer, one in enumerate(selecting)]


def check_counts(interpreter, plans, slots, backend, **paging):
    generator = torch.Generator().manual_seed(0)
    steps = []
    for rows, live, every in ((5, 4, 2), (9, 9, 4), (9, 9, 0), (140, 131, 3), (7, 5, 0), (3, 0, 1)):
        logits, row = torch.randn(len(plans), rows, 24, generator=generator), torch.arange(rows)
        steps.append((logits, None if live == rows else row < live, row % every == 0 if every else None))
    found, counters = interpreter(count_steps, steps, plans, Router(4), backend, slots, **paging)
    added = torch.zeros_like(counters.totals)
    for (counts, wanted), (_, valid, _) in zip(found, steps, strict=True):
        alive = valid is None or bool(valid.any())
        torch.testing.assert_close(counts, wanted * alive, atol=1e-9, rtol=1e-12)
        whole = [0, 1, 2, *range(4, 10)]
        assert torch.equal(counts[:, whole], wanted[:, whole] * alive)
        added += counts
    assert torch.equal(counters.totals, added)
    assert counters.totals[:, 6].max() == 2 + 3 + 44, "live exact rows"
    assert counters.outcomes.tolist() == [5 * (name == "policy") for name in OUTCOMES]
    if plans is PLANS["rescued rows"] and slots == RunnerSlots():
        assert counters.totals[:, 5].all()
    return counters.totals


@pytest.mark.parametrize("one_launch", [True, pytest.param(False, marks=COMPILED)])
def test_outcomes_of_vanilla_forwards(interpreter, one_launch):
    def step(*valid):
        return Step("decode", len(valid), Batch(torch.tensor(valid)))

    forwards = [
        ("prefill", None),
        ("min_tokens", step(True)),
        ("min_tokens", step(False)),
        ("prefill", None),
        ("phase", step(False, True)),
        ("max_tokens", Step("decode", 3, Batch())),
    ]
    counts = dict(zip(OUTCOMES, interpreter(count_outcomes, forwards, one_launch).tolist(), strict=True))
    assert {name: count for name, count in counts.items() if count} == {
        "prefill": 2,
        "min_tokens": 1,
        "phase": 1,
        "max_tokens": 1,
    }


@pytest.fixture
def counted(kernel, monkeypatch):
    """The stand-in that counts, beside the one that selects."""
    stand_in = Kernel()
    monkeypatch.setattr(counting, "count_kernel", stand_in)
    monkeypatch.setattr(selection, "_choose_backend", lambda *args: "triton")
    return stand_in


@pytest.mark.parametrize("layers", [{}, {"1": {"policy": "vanilla"}}], ids=["all layers", "one vanilla"])
def test_a_step_launches_one_kernel_a_layer_and_one_that_counts(attach, kernel, counted, layers):
    """Torch launches what tells padding rows, and nothing else."""
    model = Model(3)
    installed = attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3, "layers": layers})
    installed.counters.in_one_launch = installed.mask_padding = True
    run(model, "decode", 8)  # what is made once, a plan's numbers and the like, goes to the device
    for launched in (kernel, counted):
        launched.launches.clear()
    batch = forward_batch("decode", 8, padding=2)
    with Dispatched() as dispatched:
        model.forward(None, None, batch)
    assert dispatched.operations == ["ne"]
    assert len(kernel.launches) == 3 - len(layers)
    assert [grid for grid, _ in counted.launches] == [(3,)]


@COMPILED
@pytest.mark.parametrize("layers", [{}, {"1": {"policy": "vanilla"}}], ids=["all layers", "one vanilla"])
def test_a_cpus_step_is_one_call_a_layer_and_one_that_counts(attach, monkeypatch, layers):
    """Torch scores, and does nothing else; what a plan's first use has checked is not checked again."""
    model, calls = Model(3), []
    installed = attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3, "layers": layers})
    run(model, "decode", 8)
    library = load()
    for name in ("select_experts", "count_step"):
        monkeypatch.setattr(library, name, note(calls, name, getattr(library, name)))
    for layer in installed.layers:
        for call in layer._calls.values():
            call._run = library.select_experts
    monkeypatch.setattr(selection, "_check_inputs", lambda *args: calls.append("check"))
    batch, totals = forward_batch("decode", 8), installed.counters.totals.clone()
    with Dispatched() as dispatched:
        model.forward(None, None, batch)
    selecting = 3 - len(layers)
    assert dispatched.operations == ["_softmax"] * selecting
    assert calls == ["count_step", *["select_experts"] * selecting, "count_step"]
    assert torch.equal(installed.counters.totals, 2 * totals)


@COMPILED
def test_a_router_that_sees_other_rows_than_the_step_is_refused_at_any_time(attach):
    model = Model(2)
    attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3})
    for _ in range(2):
        run(model, "decode", 8)
    with pytest.raises(RuntimeError, match="MoE layer 0: 8 router rows in a step of 6"):
        model.forward(None, None, forward_batch("decode", 6))


def note(calls, name, function):
    """The function, with its name added to the calls whenever it runs."""

    @functools.wraps(function)
    def noted(*args):
        calls.append(name)
        return function(*args)

    return noted


def test_a_vanilla_forward_launches_one(attach, counted):
    model = Model(3)
    installed = attach(model, expert_policy="xshare", expert_policy_config={"k0": 1, "add": 3})
    installed.counters.in_one_launch = True
    batch = forward_batch("prefill", 8)
    with Dispatched() as dispatched:
        model.forward(None, None, batch)
    assert dispatched.operations == []
    assert [grid for grid, _ in counted.launches] == [(1,)]


def test_layers_with_other_experts_than_the_first_are_refused():
    counters = Counters(2, "cpu")
    counters.in_one_launch = True
    counters.tally(0, torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="12 experts in one MoE layer, 16 in another"):
        counters.tally(1, torch.randn(4, 12))
