"""The rows of ranks that each route their own: where they lie among those of all. Real ranks: `test_ranks.py`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, build_plan
from sglang_xshare.compatibility.arguments import Arguments
from sglang_xshare.policies.schedule import Schedule, build_schedule
from sglang_xshare.stage.forward import wrap_calls
from sglang_xshare.stage.gather import Gather, Ranks
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.reports import Reports
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.step import Step, StepKey, read_key
from sglang_xshare.stage.switch import check_graphs, make_next, refresh
from sglang_xshare.start import start as start_in
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, Config, Model, bind, forward_batch, make_stage, put_in_step, runner

GATHER = "sglang_xshare.stage.gather.all_gather"


def test_ranks_divide_what_they_have_in_common():
    ranks = Ranks(rank=3, size=6, share=2, num_experts=8, together=True)
    assert ranks.divide([4, 0, 6]) == (2, 2, 0, 0, 3, 3)
    assert ranks.own(torch.arange(6)).tolist() == [3, 4, 5]
    for counts in ([4, 4], [4, 3, 2], []):
        with pytest.raises(RuntimeError, match="must be 3 multiples of 2 "):
            ranks.divide(counts)


def test_rows_of_all_ranks_lie_rank_after_rank(monkeypatch):
    """A collective takes equal shapes: each rank pads its rows, and takes those of all and its own from the result."""
    rows, counts = torch.arange(20).bfloat16().view(5, 4)[:, ::2], (2, 0, 3)
    ranks = [(Gather(counts, rank), part) for rank, part in enumerate(rows.split(counts))]
    sent = []
    monkeypatch.setattr(GATHER, lambda own, ranks: sent.append(own) or own.repeat(3, 1))
    for gather, part in ranks:
        gather.collect(part)
    assert [(one.shape, one.dtype, one.is_contiguous()) for one in sent] == [((3, 2), torch.float32, True)] * 3
    monkeypatch.setattr(GATHER, lambda own, ranks: torch.cat(sent))
    for gather, part in ranks:
        found = gather.collect(part)
        assert torch.equal(found, rows.float())
        assert torch.equal(gather.keep(found, gather.own), part.float())


@pytest.mark.parametrize("gather", [None, Gather((0, 4), 0)])
def test_a_rank_without_rows_takes_part_in_the_step_of_the_others(gather, monkeypatch):
    """With a gather the rank has no row. Without one it has as many rows as the step, and all are padding."""
    sent = []
    monkeypatch.setattr(GATHER, lambda own, ranks: sent.append(own) or own.repeat(2, 1))
    layer = Layer(0, Config(), None)
    step = Step("decode", 4, Batch(), gather)
    model_forward = put_in_step(layer, build_plan("xshare", k0=1, add=2), step)
    layer.join(EXPERTS, "cpu")
    assert model_forward.selections[0].topk_ids.shape == (4, layer.router.top_k)
    assert len(sent) == (gather is not None)


@pytest.mark.parametrize(("share", "requests", "rows"), [(1, (3, 1), 3), (2, (3, 1), 2), (2, (1, 8), 4), (4, (5,), 2)])
def test_a_rank_by_itself_replays_the_graph_of_the_longest(share, requests, rows):
    """Which SGLang pads its rows to, once it has found the graph."""
    for rank, count in enumerate(requests):
        batch = forward_batch("decode", count)
        batch.global_num_tokens_cpu, batch.is_extend_in_batch = list(requests), False
        alone = Ranks(rank * share, share * len(requests), share, EXPERTS, together=False)
        assert read_key(batch, alone) == StepKey("decode", rows)
        if len(requests) == 1:  # one rank of attention exchanges no numbers of rows
            batch.global_num_tokens_cpu = None
            assert read_key(batch, alone) == StepKey("decode", rows)


def test_a_router_with_other_rows_than_the_step_is_an_error():
    layer = Layer(7, Config(), None)
    put_in_step(layer, None, Step("decode", 5, Batch(), Gather((2, 3), 0)))
    with pytest.raises(RuntimeError, match=r"^MoE layer 7: router rows of the rank must be 2 \(got 4\)$"):
        layer.collect(torch.zeros(4, EXPERTS))


def start(schedule: Schedule | None, **options: Any) -> Stage:
    """A stage of one layer."""
    return make_stage(bind(Model(1)), schedule, **options)


@pytest.mark.parametrize("ranks", [None, Ranks(0, 2, 1, EXPERTS, together=True)])
def test_routers_take_part_in_the_gather_if_ranks_route_rows_of_their_own(ranks, monkeypatch):
    """A rank whose routers do not would let the others wait forever."""
    model, router = Model(1), SimpleNamespace(empty_topk_output=print)
    monkeypatch.setattr("sglang_xshare.stage.forward.list_routers", lambda model: [router])
    wrap_calls(runner(model), Reports(make_stage(bind(model), None, ranks=ranks)))
    assert (router.empty_topk_output is print) == (ranks is None)


@pytest.mark.parametrize("together", [True, False])
def test_captured_sizes_are_counted_in_the_rows_that_ranks_select_among(together):
    """Those of all ranks, or those of one."""
    stage = start(None, ranks=Ranks(0, 2, 1, EXPERTS, together))
    asked = []
    stage.find_batches = lambda rows: asked.append(rows) or Batches((4,))
    stage.update_batches()
    assert asked == ["batch" if together else "rank"]
    assert stage.in_force.batches.captured == (4,)


@pytest.mark.usefixtures("attach")
def test_ranks_that_only_mask_padding_begin_with_the_rows_of_one_rank(monkeypatch):
    """Without a policy no rank gathers rows."""
    batches = {"batch": Batches((16,), most=64), "rank": Batches((4,), most=16)}
    monkeypatch.setattr("sglang_xshare.upstream.batches.read_batches", lambda config, rows, *args: batches[rows])
    monkeypatch.setattr("sglang_xshare.start.read_ranks", lambda *args: Ranks(0, 4, 1, EXPERTS, False))
    monkeypatch.setattr("sglang_xshare.start.wrap_calls", lambda *args: None)
    reports = start_in(runner(model := Model(1)), Arguments(schedule=None), bind(model))
    assert reports.stage.in_force.batches == batches["rank"]


@pytest.mark.parametrize(
    ("captured", "rows", "refused"), [((4,), "rank", True), ((), "rank", False), ((4,), "batch", False)]
)
def test_captured_graphs_hold_what_ranks_gather(captured, rows, refused):
    """A switch to a schedule of other rows needs graphs anew; without any, ranks follow it."""
    schedules = [build_schedule("xshare", {"k0": 1, "add": 2, "rows": name}, False) for name in ("batch", rows)]
    stage = start(schedules[0], batches=Batches(captured), ranks=Ranks(0, 2, 1, EXPERTS, True))
    for size in captured:
        stage.graphs.begin_capture(StepKey("decode", size), stage.in_force)
    if refused:
        with pytest.raises(ValueError, match="the rows that ranks gather change"):
            check_graphs(stage, make_next(stage, schedules[1]), recaptures=False)
        return
    latter = make_next(stage, schedules[1])
    assert check_graphs(stage, latter, recaptures=False) is not None
    stage.in_force = latter
    assert stage.in_force.ranks.together == (rows == "batch")


@pytest.mark.parametrize("captured", [(4,), ()])
def test_a_switch_of_rows_reads_the_sizes_in_the_new_unit(captured):
    """Also without graphs, whose capture would read them; and a switch back to vanilla keeps both, and no capture."""
    stage = start(None, batches=Batches(captured, most=8), ranks=Ranks(0, 2, 1, EXPERTS, True))
    units = {"batch": Batches(captured, most=8), "rank": Batches(tuple(rows // 2 for rows in captured), most=4)}
    stage.find_batches = units.__getitem__
    vanilla = stage.in_force
    for size in captured:
        stage.graphs.begin_capture(StepKey("decode", size), stage.in_force)
    schedule = build_schedule("xshare", {"k0": 1, "add": 2, "rows": "rank"}, False)
    stage.in_force = former = make_next(stage, schedule)
    assert former.batches == units["rank"]
    for again in (refresh(stage, vanilla), make_next(stage, None)):
        assert check_graphs(stage, again) is not None
        assert (again.ranks.together, again.batches) == (False, units["rank"])
    stage.in_force = make_next(stage, build_schedule("xshare", {"k0": 1, "add": 2}, False))
    assert stage.in_force.batches == units["batch"]
    again = refresh(stage, former)
    assert (again.ranks.together, again.batches) == (False, units["rank"])
