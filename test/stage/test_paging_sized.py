"""Paged experts whose slots SGLang sizes itself after loading: `paged_experts_num_resident` may become None."""

import torch

from sglang_xshare import Batch, hooks, select
from sglang_xshare.stage.frame import ModelForward
from sglang_xshare.stage.record.counters import Reader
from sglang_xshare.stage.step import Step, StepKey
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, allows_graph
from stage.paged_model import LAYERS, REPORTER, SLOTS, PagedModel, decode, make_schedule, page, put
from stage.switching import Capturing, switch

PUBLISHED = {"k0": 1, "add": 2}


def size(model: PagedModel, slots: int | None) -> None:
    """Set the number of slots of every layer, as SGLang does after loading; None before."""
    for paging in model.paging:
        paging.num_resident = slots


def put_unsized(monkeypatch, **keys):
    """Return a model whose slots are not sized yet, and the stage around it."""
    model = PagedModel()
    size(model, None)
    return model, put(monkeypatch, model, **keys)


def test_slots_that_sglang_sizes_after_the_model_has_loaded_are_those_of_its_steps(monkeypatch):
    model, stage = put_unsized(monkeypatch, **PUBLISHED)
    assert stage.paged is not None
    (method, *_), (layer, *_) = model.paging, stage.layers
    key = StepKey("decode", 4)
    assert not stage.fits_slots(method)
    assert not stage.in_force.fits(key), "nothing is known to fit"
    size(model, SLOTS)
    assert stage.in_force.fits(key)
    assert stage.paged.residents.slots == SLOTS
    plan = stage.in_force.schedule.plan(0, 4)
    for step in range(6):
        decode(model, step, 4)
        for routed, loaded in zip(model.routed, model.loaded, strict=True):
            wanted = select(model.logits, plan, layer.router, Batch(resident=loaded, slots=SLOTS), backend="reference")
            filled = wanted.topk_ids >= 0
            assert torch.equal(routed[1][filled], wanted.topk_ids[filled])


def test_a_plan_found_before_the_slots_are_sized_is_found_anew(monkeypatch):
    """With no slot any resident may join. With slots for all experts of two rows the plan changes nothing."""
    model, stage = put_unsized(monkeypatch, k0=1, add=24)
    layer, key = stage.layers[0], StepKey("decode", 2)
    assert stage.in_force.find(layer, key).reason is None
    assert stage.in_force.find_outcome(key) == "policy"
    size(model, SLOTS)
    assert stage.in_force.find(layer, key).reason == stage.in_force.find_outcome(key) == "unchanged"


def test_a_step_before_the_slots_are_sized_has_no_number_of_them(monkeypatch):
    """Then every resident may join what the policy selects."""
    model, stage = page(monkeypatch, **PUBLISHED)
    size(model, None)
    stage.paged.residents.read()
    model_forward = ModelForward(Step("decode", 4, Batch()), [], residents=stage.paged.residents)
    batches = [model_forward.find_batch(index) for index in range(LAYERS)]
    assert [(batch.slots, int(batch.resident.sum())) for batch in batches] == [(None, SLOTS)] * LAYERS


def test_slots_that_come_to_all_experts_page_nothing(monkeypatch):
    model, stage = put_unsized(monkeypatch, **PUBLISHED)
    size(model, EXPERTS)
    assert stage.in_force.fits(StepKey("decode", 32))
    decode(model, 0, 8)
    interval = Reader(stage.acting.counters).read()
    assert interval.page_ins <= interval.page_ins_before


def test_graphs_captured_anew_are_those_of_steps_that_fit(monkeypatch):
    """SGLang refuses to capture a step that could take several waves. Those that the next policy fits come back."""
    model, stage = page(monkeypatch, **PUBLISHED)
    capture = Capturing(monkeypatch, model, stage)

    def place(paging, experts):
        assert not capture.recorded or hooks.fits_slots(paging), "a captured decode batch routes more entries"

    monkeypatch.setattr(type(model.paging[0]), "place", place)
    capture(fits=lambda requests: stage.in_force.fits(StepKey("decode", requests)))
    assert stage.graphs.rows == [1, 2, 8]
    for keys, rows in (
        ({"policy": "observe", "plans": ["xshare:k0=1,add=2"]}, [1, 2]),
        ({"policy": "oea", "k0": 2, "kmax": 6}, [1, 2]),
        ({"policy": "xshare", **PUBLISHED}, [1, 2, 8]),
    ):
        assert switch(stage, make_schedule(**keys), REPORTER) is not None
        assert stage.graphs.rows == rows
        assert [size for size in (1, 2, 8) if allows_graph(size)] == rows


def test_captured_sizes_are_those_of_the_active_policy_whatever_came_before(monkeypatch):
    """A policy that only differs in numbers may fit larger batches than the graphs of the previous policy."""
    monkeypatch.setattr("stage.switching.SIZES", (4, 8))
    model, stage = page(monkeypatch, k0=3, add=2)
    capture, stage.find_batches = Capturing(monkeypatch, model, stage), lambda rows: Batches((4, 8))
    capture(fits=lambda requests: stage.in_force.fits(StepKey("decode", requests)))
    assert stage.graphs.rows == [4]
    larger, smaller = make_schedule("xshare", k0=1, add=2), make_schedule("xshare", k0=3, add=2)
    for schedule, may_capture, captures, rows in (
        (larger, False, False, [4]),
        (None, True, False, [4]),
        (larger, True, True, [4, 8]),
        (larger, True, False, [4, 8]),
        (smaller, True, False, [4, 8]),
    ):
        assert (switch(stage, schedule, REPORTER, recaptures=may_capture) is not None) == captures
        assert stage.graphs.rows == rows
    assert [size for size in (4, 8) if allows_graph(size)] == [4]


def test_a_request_pool_limits_the_sizes_that_a_switch_captures(monkeypatch):
    """Otherwise each switch would capture the same graphs again."""
    monkeypatch.setattr("stage.switching.SIZES", (4,))
    model, stage = page(monkeypatch, **PUBLISHED)
    stage.device, stage.find_batches = "cuda", lambda rows: Batches((4,), most=4)
    Capturing(monkeypatch, model, stage)()
    monkeypatch.setattr("sglang_xshare.stage.switch.find_largest", lambda fits: 8)
    assert switch(stage, make_schedule("xshare", k0=1, add=1), REPORTER) is None
