"""A step is counted by what its selections have left in a tally: exactly what the reference says of its logits."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from selection.compared import DEVICE
from selection.compiled import NEEDS_COMPILER
from selection.interpreter import interpreted
from selection.launched import Dispatched, kernel
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select, selection
from sglang_xshare.selection.cpu_call import load
from sglang_xshare.stage.record.counters import EXACT, EXCEEDED, MAX_SHAPES, RESCUED, STEPS, Counters, StepTally
from sglang_xshare.stage.step import Step
from stage.counted import count_steps
from stage.fake import flags, forward_batch, run
from stage.record.tally import make_tally

__all__ = ["kernel"]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU: the tests of serving count on it")
ROUTER = Router(4)
PLANS = {
    "xshare": [build_plan("xshare", k0=1, add=3), build_plan("pruned", k0=1)],
    "a vanilla layer": [None, build_plan("xshare", k0=1, add=3), None],
    "rescued rows": [build_plan("moe-spec", budget=1, coverage="truncate")] * 2,
}


@pytest.fixture(scope="module")
def interpreter():
    with interpreted() as run:
        yield run


def run_here(function, *args):
    """In this process, without an interpreter."""
    return function(*args)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=NEEDS_COMPILER), False])
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=NEEDS_COMPILER), "torch"])
@pytest.mark.parametrize("plans", PLANS)
def test_in_one_call_and_in_plain_torch(monkeypatch, plans, backend, compiled):
    """As on a CPU with the compiled library, and without."""
    if not compiled:
        monkeypatch.setattr("sglang_xshare.stage.record.counters.load", lambda: None)
    check_counts(run_here, PLANS[plans], RunnerSlots(), backend)
    loaded = torch.rand(len(PLANS[plans]), 24, generator=torch.Generator().manual_seed(1)) < 0.4
    check_counts(run_here, PLANS[plans], RunnerSlots(), backend, loaded, 5)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("slots", [RunnerSlots(), RunnerSlots(masked=True)], ids=["slots", "masked"])
@pytest.mark.parametrize("plans", PLANS)
def test_a_step_is_counted_as_the_reference_selects(interpreter, plans, slots, backend):
    """Steps of several sizes, with padding and exact rows and without; one in which no row lives counts as none."""
    check_counts(interpreter, PLANS[plans], slots, backend)


@pytest.mark.parametrize("plans", ["xshare", "a vanilla layer"])
def test_page_ins_are_counted_as_the_reference_selects(interpreter, plans):
    loaded = torch.rand(len(PLANS[plans]), 24, generator=torch.Generator().manual_seed(1)) < 0.4
    totals = check_counts(interpreter, PLANS[plans], RunnerSlots(), "triton", loaded, 5)
    selecting = [plan is not None for plan in PLANS[plans]]
    assert [bool(row.all()) for row in totals[:, 7:9]] == selecting
    # Of every second layer it was ruled out.
    exceeded = totals[:, EXCEEDED].bool().tolist()
    assert exceeded == [one and layer % 2 == 0 for layer, one in enumerate(selecting)]


def check_counts(interpreter, plans, slots, backend, loaded=None, num_slots=0):
    """The totals, after comparing each step's counts and their sum."""
    generator = torch.Generator().manual_seed(0)
    steps = []
    for rows, live, every in ((5, 4, 2), (9, 9, 4), (9, 9, 0), (40, 31, 3), (7, 5, 0), (3, 0, 1)):
        logits, row = torch.randn(len(plans), rows, 24, generator=generator), torch.arange(rows)
        steps.append((logits, None if live == rows else row < live, row % every == 0 if every else None))
    # In several programs of the kernel, with fewer active experts than top-k.
    steps.append((torch.randn(len(plans), 1, 24, generator=generator).repeat(1, 40, 1), None, None))
    found, counters = interpreter(count_steps, steps, plans, ROUTER, backend, slots, loaded, num_slots)
    for counts, (logits, valid, exact) in zip(found, steps, strict=True):
        for layer, plan in enumerate(plans):
            there = None if loaded is None else loaded[layer]
            expected = expect(plan, logits[layer], Batch(valid, exact=exact), slots, there, num_slots, layer % 2 == 0)
            assert counts[layer].tolist() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(counters.totals, sum(found), atol=1e-9, rtol=0)
    assert counters.totals[:, EXACT].max() == 2 + 3 + 11, "live exact rows"
    if plans is PLANS["rescued rows"] and slots == RunnerSlots():
        assert counters.totals[:, RESCUED].all()
    return counters.totals


def expect(plan, logits, batch, slots, loaded, num_slots, fits):
    """A layer's ten columns in a step."""
    live = torch.ones(len(logits), dtype=torch.bool) if batch.valid is None else batch.valid
    if plan is None or not live.any():
        return [0] * 10
    chosen = select(logits, plan, ROUTER, batch, backend="reference", slots=slots)
    before, after = chosen.vanilla_active, chosen.active
    exact = 0 if batch.exact is None else int((batch.exact & live).sum())
    counts = [1, int(before.sum()), int(after.sum()), float(chosen.kept_mass.sum()), int(live.sum())]
    counts += [int(chosen.rescued), exact]
    if loaded is None:
        return counts + [0] * 3
    missing = [int((experts & ~loaded).sum()) for experts in (before, after)]
    return [*counts, *missing, int(fits and after.sum() > num_slots)]


@pytest.mark.parametrize("layers", [{}, {"1": {"policy": "vanilla"}}], ids=["all layers", "one vanilla"])
def test_counting_takes_as_many_operations_for_any_number_of_layers(build, kernel, monkeypatch, layers):
    """A layer is one launch, and a dozen or two small operations count all of them."""
    monkeypatch.setattr(selection, "_choose_backend", lambda *args: "triton")
    operations = []
    for depth in (2, 6):
        model, installed = build(depth, **flags("xshare", k0=1, add=3, layers=layers))
        installed.reads_padding = True
        run(model, "decode", 8)  # what is made once, a plan's numbers and the like, goes to the device
        kernel.launches.clear()
        batch = forward_batch("decode", 8, padding=2)
        with Dispatched() as dispatched:
            model.forward(None, None, batch)
        assert len(kernel.launches) == depth - len(layers)
        operations.append(dispatched.operations)
    assert operations[0] == operations[1]
    assert len(operations[0]) <= 24, operations[0]


@NEEDS_COMPILER
@pytest.mark.parametrize("layers", [{}, {"1": {"policy": "vanilla"}}], ids=["all layers", "one vanilla"])
def test_a_cpus_step_is_one_call_a_layer_and_one_that_counts(build, monkeypatch, layers):
    """Torch scores; what a plan's first use has checked is not checked again."""
    (model, installed), calls = build(**flags("xshare", k0=1, add=3, layers=layers)), []
    run(model, "decode", 8)
    library = load()
    for name in ("select_experts", "count_step"):
        monkeypatch.setattr(library, name, note(calls, name, getattr(library, name)))
    for _, call in (kept for layer in installed.layers for kept in layer._calls.values()):
        call._run = library.select_experts
    monkeypatch.setattr(selection, "_check_inputs", lambda *args: calls.append("check"))
    batch, totals = forward_batch("decode", 8), installed.acting.counters.totals.clone()
    with Dispatched() as dispatched:
        model.forward(None, None, batch)
    selecting = 3 - len(layers)
    # The tally's two marks are set to 0 once, and every layer's logits are scored.
    assert dispatched.operations == [*["zero_"] * 2, *["_softmax"] * selecting]
    assert calls == [*["select_experts"] * selecting, "count_step"]
    assert torch.equal(installed.acting.counters.totals, 2 * totals)


@NEEDS_COMPILER
def test_a_layer_that_does_not_select_again_is_vanilla_in_the_tables_kept():
    """The next step of a shape finds them as the last one left them."""
    counters, logits = Counters(2, "cpu"), torch.randn(4, 16)
    plan = build_plan("xshare", k0=1, add=3)
    for layers in ((0, 1), (1,)):
        counted = StepTally(counters)
        for layer in layers:
            select(logits, plan, ROUTER, tally=counted.of(layer, logits))
        assert counted.layers.active.any(1).tolist() == [0 in layers, True]
        counts = counters.count(Step("decode", 4, Batch()), counted)
        assert counts[:, STEPS].tolist() == [float(0 in layers), 1.0]


@NEEDS_COMPILER
def test_tables_are_kept_of_so_many_shapes_and_for_every_mode():
    counters, plan = Counters(2, "cpu"), build_plan("xshare", k0=1, add=3)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for rows in range(2, MAX_SHAPES + 10):
                logits = torch.randn(rows, 16)
                counted = StepTally(counters)
                select(logits, plan, ROUTER, tally=counted.of(1, logits))
                assert counters.count(Step("decode", rows, Batch()), counted)[:, STEPS].tolist() == [0.0, 1.0]
                assert len(counters._by_shape) <= MAX_SHAPES


def note(calls, name, function):
    """The function, with its name added to the calls whenever it runs."""

    @functools.wraps(function)
    def noted(*args):
        calls.append(name)
        return function(*args)

    return noted


def test_layers_with_other_experts_than_the_first_are_refused():
    counted = StepTally(Counters(2, "cpu"))
    assert counted.of(0, torch.randn(0, 16)) is None, "a rank without rows"
    counted.of(0, torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="12 experts in one MoE layer, 16 in another"):
        counted.of(1, torch.randn(4, 12))


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=NEEDS_COMPILER), False])
def test_slots_are_exceeded_by_more_experts_than_there_are(monkeypatch, compiled):
    """As many active experts as slots fit; one more is counted for a layer that promised to fit."""
    if not compiled:
        monkeypatch.setattr("sglang_xshare.stage.record.counters.load", lambda: None)
    counters = Counters(3, "cpu", SimpleNamespace(loaded=torch.zeros(3, 16, dtype=torch.bool), slots=3))
    counted, tally = StepTally(counters), make_tally([(4, 3), (4, 4), (4, 4)])
    counted.layers = dataclasses.replace(tally, kept_mass=tally.kept_mass.contiguous())
    counts = counters.count(Step("decode", 1, Batch()), counted, [True, True, False])
    assert counts[:, EXCEEDED].tolist() == [0, 1, 0]
