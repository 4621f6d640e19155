"""Experts that are paged into slots: what is loaded is read before each step, page-ins are counted exactly, and no step
that SGLang was told would fit its slots has more experts active.
"""

import json
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sglang_xshare import Batch, hooks, select
from sglang_xshare.compatibility.paging import fits
from sglang_xshare.selection.triton_kernel.budgets import encode
from sglang_xshare.stage.frame import ModelForward
from sglang_xshare.stage.paged import SlotsExceeded
from sglang_xshare.stage.record.counters import Reader
from sglang_xshare.stage.step import StepKey
from sglang_xshare.upstream.batches import Batches
from sglang_xshare.upstream.paging import Residents
from stage.fake import EXPERTS, TOP_K, allows_graph, forward_batch, runner
from stage.paged_model import LAYERS, REPORTER, SLOTS, PagedModel, Paging, decode, make_schedule, page, put
from stage.switching import Capturing, note_selections, switch

PUBLISHED = {"k0": 1, "add": 2}


@pytest.mark.parametrize(
    "keys", [PUBLISHED, PUBLISHED | {"utility": "squared", "own_share": 0.75}, {"k0": 2, "add": 0}]
)
def test_a_step_is_the_references_on_what_is_loaded(monkeypatch, keys):
    model, stage = page(monkeypatch, **keys)
    plan, router = stage.in_force.schedule.plan(0, 4), stage.layers[0].router
    assert stage.in_force.schedule.min_rows == 1
    for step, rows in enumerate([1, 4, 6, 2, 5, 6, 6, 3] * 3):
        decode(model, step, rows)
        for routed, loaded in zip(model.routed, model.loaded, strict=True):
            wanted = select(model.logits, plan, router, Batch(resident=loaded, slots=SLOTS), backend="reference")
            filled = wanted.topk_ids >= 0
            assert torch.equal(routed[1][filled], wanted.topk_ids[filled])
            torch.testing.assert_close(routed[0], wanted.topk_weights)
            assert len(routed[1].unique()) <= SLOTS


def test_page_ins_are_what_was_paged_in(monkeypatch, tmp_path):
    model, stage = page(monkeypatch, trace=tmp_path / "trace.jsonl", **PUBLISHED)
    for step in range(20):
        decode(model, step, 1 + step % 9)
    paged = sum(paging.loads for paging in model.paging)
    interval = Reader(stage.acting.counters).read()
    assert (interval.page_ins_before, interval.page_ins) == (model.before, paged)
    assert 0 < paged < model.before
    line = hooks.report(REPORTER)
    steps = 20 * LAYERS
    assert f"page-ins: {model.before / steps:.1f} -> {paged / steps:.1f}, kept mass" in line
    records = [json.loads(text) for text in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert sum(record["page_ins"] for record in records) == paged
    assert sum(record["page_ins_before"] for record in records) == model.before
    assert all(record["experts_after"] <= SLOTS for record in records)


def test_observe_tells_what_a_plan_would_have_paged_in_from_the_same_state(monkeypatch):
    model, stage = page(monkeypatch, "observe", plans=["xshare:k0=1,add=2", "xshare:k0=1,add=2,free_residents=false"])
    assert {part.min_rows for part in stage.in_force.schedule.parts} == {1}, "as the policies themselves would have"
    kept = [0, 0]
    for step in range(12):
        decode(model, step, 4)
        assert not any(model.routed)
        for loaded in model.loaded:
            for number, part in enumerate(stage.in_force.schedule.parts):
                batch = Batch(resident=loaded, slots=SLOTS)
                wanted = select(model.logits, part.plan(0, 4), stage.layers[0].router, batch, backend="reference")
                kept[number] += int((wanted.active & ~loaded).sum())
    own = Reader(stage.acting.counters).read()
    assert own.page_ins == own.page_ins_before == model.before == sum(paging.loads for paging in model.paging)
    observed = [Reader(counters).read() for counters in [lane.counters for lane in stage.in_force.lanes]]
    assert [interval.page_ins for interval in observed] == kept
    assert {interval.page_ins_before for interval in observed} == {model.before}
    assert all(0 < count < model.before for count in kept)
    text = hooks._reports.log()
    assert f"page-ins: {model.before / 12 / LAYERS:.1f}, batch size" in text
    assert f"(page-ins {kept[0] / 12 / LAYERS:.1f}, kept mass" in text


def test_where_all_experts_have_slots_nothing_is_paged(monkeypatch):
    """A policy then does what it does without paging."""
    plain = put(monkeypatch, PagedModel(slots=EXPERTS), **PUBLISHED)
    assert plain.paged is None
    model = PagedModel(slots=EXPERTS)
    model.runner = runner(model)
    decode(model, 0, 4)
    assert all(routed is None for routed in model.routed)  # of another model
    assert "page-ins" not in hooks._reports.log()


def test_all_experts_fit_in_a_step_where_all_have_slots(monkeypatch):
    """Of a prefill's thousands of entries, upstream decides on the host."""
    stage, told = put(monkeypatch, model := PagedModel(slots=EXPERTS), **PUBLISHED), []
    full = SimpleNamespace(num_resident=EXPERTS, num_experts=EXPERTS)
    layer = stage.layers[0]
    choose = type(layer)._select_by_plan

    def choose_and_ask(*args):
        told.append(stage.fits_slots(full))
        return choose(*args)

    monkeypatch.setattr(type(layer), "_select_by_plan", choose_and_ask)
    decode(model, 0, 4)
    assert told
    assert all(told)
    assert not stage.fits_slots(full)
    assert not stage.run(forward_batch("prefill", 4), lambda: stage.fits_slots(full))


@pytest.mark.parametrize(
    ("policy", "keys", "most"),
    [
        ("xshare", {"k0": 1, "add": 24}, 12),
        ("xshare", {"k0": 2, "add": 0}, 6),
        ("xshare", {"k0": 1, "add": 2, "free_residents": False}, 10),
        ("xshare", {"k0": 1, "add": 2, "max_rows": 5}, 5),
        ("xshare", {"k0": 1, "add": 2, "layers": {"1": {"policy": "vanilla"}}}, 3),
        ("xshare", {"k0": 1, "add": 2, "by_rows": {"7": {"k0": 2}}}, 6),
        ("pruned", {"k0": 2}, 6),
        ("observe", {}, 3),
    ],
)
def test_what_fits_is_known_by_the_plan(monkeypatch, policy, keys, most):
    """`most` rows, counted by hand: 12 slots, top-4. Admission and stage say the same, and random steps agree."""
    model, stage = page(monkeypatch, policy, **keys)
    schedule = stage.in_force.schedule
    for rows in range(1, 20):
        found = stage.in_force.fits(StepKey("decode", rows))
        assert found == fits(schedule, rows, TOP_K, EXPERTS, SLOTS)
        if rows <= most + 1:
            assert found == (rows <= most)
        if found:
            decode(model, rows, rows)
            assert all(len(ids.unique()) <= SLOTS for ids in (r[1] for r in model.routed if r is not None))


def test_fitting_is_said_of_the_step_at_hand(monkeypatch):
    model, _ = page(monkeypatch, **PUBLISHED)
    told = []
    for paging in model.paging:
        monkeypatch.setattr(paging, "place", lambda experts, paging=paging: told.append(hooks.fits_slots(paging)))
    decode(model, 0, 12)
    decode(model, 0, 13)
    model.forward(None, None, forward_batch("prefill", 12))
    assert told == [True] * LAYERS + [False] * 2 * LAYERS
    assert not hooks.fits_slots(model.paging[0])


def test_a_switch_keeps_the_bound(monkeypatch):
    """A graph is not replayed under plans that could have more experts active than slots."""
    _, stage = page(monkeypatch, **PUBLISHED)
    sizes = 1, 3, 4, 8

    def allowed():
        return [rows for rows in sizes if allows_graph(rows)]

    assert allowed() == list(sizes)
    switch(stage, None, REPORTER)
    assert allowed() == [1, 3]
    switch(stage, make_schedule("xshare", k0=2, add=1), REPORTER)
    assert allowed() == [1, 3, 4]
    switch(stage, make_schedule("xshare", **PUBLISHED, min_rows=8), REPORTER)
    assert allowed() == [1, 3, 8]
    switch(stage, make_schedule("xshare", **PUBLISHED), REPORTER)
    assert allowed() == list(sizes)


def capture(monkeypatch, stage, model, rows):
    """A step of so many rows as SGLang captures it: first eagerly, then recorded."""
    stage.find_batches = lambda _: Batches(tuple(size for size in (1, 2, 4, 8) if size <= rows))
    Capturing(monkeypatch, model, stage).capture(rows, lambda model, rows: decode(model, 0, rows))
    stage.device = "cpu"


def test_an_eager_step_reads_the_numbers_of_the_plan_in_force(monkeypatch):
    """Also where a graph of its size, which is not replayed now, keeps those that it goes on with afterwards."""
    model, launched = PagedModel(), note_selections(monkeypatch)
    stage = put(monkeypatch, model, **PUBLISHED)
    capture(monkeypatch, stage, model, 8)
    graphs = [kept.buffer for layers in stage.graphs.captured.values() for kept in layers.values()]
    for keys, follows in (
        (PUBLISHED | {"k0": 3}, False),
        (PUBLISHED | {"add": 1}, True),
        (PUBLISHED | {"k0": 3}, False),
        (PUBLISHED, True),
    ):
        switch(stage, make_schedule("xshare", **keys), REPORTER)
        plan = stage.in_force.schedule.plan(0, 8)
        assert allows_graph(8) == follows
        numbers = encode(plan).tolist()
        assert all((buffer.values.tolist() == numbers) == follows for buffer in graphs)
        launched.clear()
        decode(model, 0, 8)
        assert launched
        assert all(
            one.plan == plan if one.budgets is None else one.budgets.values.tolist() == numbers for one in launched
        )


OBSERVE = {"policy": "observe", "plans": ["xshare:k0=1,add=2"]}
FORMS = {"policy": {"policy": "xshare", **PUBLISHED}, "observe": OBSERVE, "vanilla": None}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("rows", [2, 8], ids=["fits", "does not fit"])
@pytest.mark.parametrize(("former", "latter"), list(product(FORMS, FORMS)))
def test_no_switch_frees_what_graphs_write_to(monkeypatch, tmp_path, former, latter, rows, traced):
    """To and from observe they would be captured anew, also while no graph may be replayed: it may be again. To vanilla
    no capture is needed, since what cannot follow is not replayed.
    """
    model = PagedModel()
    start = dict(FORMS[former] or FORMS["policy"])
    stage = put(monkeypatch, model, start.pop("policy"), trace=tmp_path / "trace" if traced else None, **start)
    capture(monkeypatch, stage, model, rows)
    if former == "vanilla":
        switch(stage, None, REPORTER)
    written = stage.in_force.lanes, stage.trace and stage.trace.ring
    keys = FORMS[latter]
    schedule = keys and make_schedule(**keys)
    if latter == "vanilla" or (former == "observe") == (latter == "observe"):
        switch(stage, schedule, REPORTER)
        assert (stage.in_force.given["policy"] == "vanilla") == (latter == "vanilla")
    else:
        with pytest.raises(ValueError, match=f"graphs of {rows} rows: the plans that observe compares have changed"):
            switch(stage, schedule, REPORTER, recaptures=False)
    assert list(written[0]) == list(stage.graphs._lanes)
    assert bool(stage.graphs.stale) == (former == "observe" and latter == "vanilla")
    assert not traced or written[1] is stage.trace.ring


def test_captured_anew_while_it_is_not_replayed_a_step_keeps_its_promise(monkeypatch):
    """As in a weight update under vanilla: the graph is not to ask the host where experts go."""
    model, stage = page(monkeypatch, **PUBLISHED)
    capture(monkeypatch, stage, model, 8)
    switch(stage, None, REPORTER)
    frames, check = [], ModelForward.check
    monkeypatch.setattr(ModelForward, "check", lambda frame, layer_ids: frames.append(frame) or check(frame, layer_ids))
    capture(monkeypatch, stage, model, 8)
    assert all(chosen is not None for chosen in frames[-1].selections)
    assert all(assignment.fits for assignment in frames[-1].assignments)


def test_a_broken_bound_stops_the_server(monkeypatch):
    """Selection that knows nothing of slots, which no plan allows, stands for a bound that was wrong."""
    model, stage = page(monkeypatch, k0=1, add=24)
    decode(model, 0, 8)
    hooks.publish(REPORTER)

    def forget(logits, plan, router, batch, *args, **options):
        return select(logits, plan, router, Batch(batch.valid), *args, **options)

    monkeypatch.setattr("sglang_xshare.stage.layer.select", forget)
    for layer in stage.layers:
        layer._calls.clear()  # as before a plan's first use
    decode(model, 0, 8)
    with pytest.raises(
        SlotsExceeded, match=re.escape(f"more than {SLOTS} experts were active in MoE layers [0, 1, 2]")
    ):
        hooks._reports.publish(always=True)


def test_what_was_not_promised_may_exceed_the_slots(monkeypatch):
    """Waves take it."""
    model, _ = page(monkeypatch, k0=3, add=24)
    decode(model, 0, 40)
    assert any(len(routed[1].unique()) > SLOTS for routed in model.routed)
    hooks.publish(REPORTER)


def test_no_expert_is_loaded_if_no_expert_is_resident():
    methods = [SimpleNamespace(num_experts=EXPERTS, device_executor=None, policy=SimpleNamespace(resident=()))] * 2
    residents = Residents(methods, "cpu")
    residents.read()
    assert not residents.loaded.any()


def test_state_on_the_device_is_read_where_upstream_writes_it():
    """`DeviceResidency`: its tensors become rows of one, which upstream goes on writing in place."""
    methods = [Paging() for _ in range(2)]
    for number, method in enumerate(methods):
        slots = torch.full((EXPERTS,), -1, dtype=torch.int32)
        slots[number : number + SLOTS] = torch.arange(SLOTS, dtype=torch.int32)
        method.device_executor = SimpleNamespace(residency=SimpleNamespace(expert_slot=slots))
    residents = Residents(methods, "cpu")
    loaded = residents.loaded
    residents.read()
    assert [row.nonzero().flatten().tolist() for row in loaded] == [list(range(12)), list(range(1, 13))]
    for method in methods:  # expert 30 takes the place of expert 5
        state = method.device_executor.residency.expert_slot
        assert state.is_contiguous()
        state[30], state[5] = int(state[5]), -1
    residents.read()
    assert residents.loaded is loaded
    assert all(bool(row[30]) and not row[5] and row.sum() == SLOTS for row in loaded)
