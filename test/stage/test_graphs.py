"""What a switch makes of captured graphs: their numbers are written, or it says why they would be captured anew."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_xshare.policies.bounds import open_up
from sglang_xshare.policies.plan import SelectionPlan
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.selection.triton_kernel.budgets import NUMBERS, encode
from sglang_xshare.stage.frame import Assignment, Frame, ModelForward
from sglang_xshare.stage.graphs import Graphs, describe_misfits
from sglang_xshare.stage.in_force import InForce
from sglang_xshare.stage.lane import Lane, make_lanes
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.record.counters import Counters
from sglang_xshare.stage.step import Step, StepKey
from sglang_xshare.types import Batch
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, Config, Model, bind

ROWS = (1, 2, 4, 16)
MASS = NUMBERS.index("mass")
BATCHES = Batches(captured=ROWS)
TIGHT = {"policy": "xshare", "k0": 1, "add": 1}
STATIC = {"policy": "moe-spec", "phases": ["decode"], "budget": 4, "ranking": "static", "order": [*range(EXPERTS)]}
VANILLA = {"policy": "vanilla"}


def make_plans(keys: dict[str, Any]) -> InForce:
    own = {name: value for name, value in keys.items() if name != "policy"}
    schedule = build_schedule(keys["policy"], own, speculative="acceptance" in keys)
    return InForce(schedule, BATCHES, lanes=make_lanes(schedule, Lane(None, Counters(2, "cpu"))))


def capture(keys: dict[str, Any], num_layers: int = 2) -> tuple[Graphs, InForce, list[Layer]]:
    """Graphs of every size, as the stage captures them: each once eagerly, then recorded."""
    graphs, plans = Graphs(), make_plans(keys)
    layers = bind(Model(num_layers))
    for rows in ROWS:
        run(graphs, plans, layers, Step("decode", rows, Batch()))
        record(graphs, plans, layers, rows)
    return graphs, plans, layers


def run(graphs: Graphs, plans: InForce, layers: list[Layer], step: Step) -> None:
    """An eager step, which reads no buffer."""
    model_forward = ModelForward(step, replace(plans, layers=layers).assign(step.key))
    layers[0].current_frame.frame = Frame(step.key, "policy", model_forward)
    for layer, assignment in zip(layers, model_forward.assignments, strict=True):
        plan = assignment.plan
        assert (plan, assignment.buffer) == (plans.find(layer, step.key).plan, None)
        chosen = None if plan is None else layer.select(torch.zeros(step.rows, EXPERTS), plan, step.batch)
        model_forward.selections[layer.index] = chosen
    graphs.prepare(layers, step, model_forward)


def record(graphs: Graphs, plans: InForce, layers: list[Layer], rows: int) -> list[Assignment]:
    """What each layer does in a step of so many rows that is captured."""
    return graphs.begin_capture(StepKey("decode", rows), replace(plans, layers=layers))


def capture_anew(graphs: Graphs, plans: InForce, layers: list[Layer]) -> dict[tuple[int, int], SelectionPlan | None]:
    """As a weight update has SGLang do it, under the plans in force: by layer and rows, whose kernel is captured."""
    kept, found = {key: dict(layers) for key, layers in graphs.captured.items()}, {}
    for rows in ROWS:
        run(graphs, plans, layers, Step("decode", rows, Batch()))
        for layer, assignment in zip(layers, record(graphs, plans, layers, rows), strict=True):
            assert assignment.buffer is kept[StepKey("decode", rows)][layer].buffer, "no copy in a capture"
            found[layer.layer_id, rows] = assignment.plan
    return found


def follow(graphs: Graphs, plans: InForce) -> None:
    """A switch that every graph follows."""
    changes = graphs.find_changes(plans)
    assert not changes.misfits
    graphs.follow(changes)


def read(graphs: Graphs) -> dict[tuple[int, int], list[int]]:
    """The numbers that each graph's kernels would read, by layer and rows."""
    return {
        (layer.layer_id, key.rows): kept.buffer.values.tolist()
        for key, layers in graphs.captured.items()
        for layer, kept in layers.items()
        if kept.buffer is not None
    }


def test_numbers_are_written_for_every_layer_and_size():
    graphs, former, layers = capture(TIGHT)
    assert graphs.selecting == [2, 4, 16]
    wanted = {"policy": "xshare", "k0": 2, "add": 4, "layers": {"1": {"add": 3}}, "by_rows": {"4": {"k0": 3}}}
    plans = make_plans(wanted)
    follow(graphs, plans)
    opened = open_up(former.find(layers[0], StepKey("decode", 2)).plan, layers[0].router)
    for (layer_id, rows), numbers in read(graphs).items():
        plan = plans.find(layers[layer_id], StepKey("decode", rows)).plan
        # Two rows of top-4 want four experts beyond two each, as layer 0 has: the model's own routing, by numbers.
        assert (plan is None) == (layer_id == 0 and rows == 2)
        assert numbers == encode(plan or opened).tolist()
    follow(graphs, former)
    assert read(graphs) == read(capture(TIGHT)[0])


@pytest.mark.parametrize("mass", ["careful", "fast", 0.8])
def test_graphs_of_bare_xshare_follow_to_its_presets(mass):
    graphs, _, _ = capture({"policy": "xshare"})
    plans = make_plans({"policy": "xshare", "k0": 1, "mass": mass})
    follow(graphs, plans)
    assert read(graphs) == read(capture({"policy": "xshare", "k0": 1, "mass": mass})[0])


def test_each_graph_has_the_share_of_its_own_rows():
    def shares(graphs: Graphs) -> dict[int, float]:
        bits = {rows: torch.tensor(numbers[MASS]) for (_, rows), numbers in read(graphs).items()}
        return {rows: one.view(torch.float64).item() for rows, one in bits.items()}

    graphs, former, _ = capture({"policy": "xshare"})
    assert shares(graphs) == {2: 0.85, 4: 0.85, 16: 0.93}
    plans = make_plans({"policy": "xshare", "mass": "careful", "by_rows": {"4": {"mass": 0.5}}})
    follow(graphs, plans)
    assert shares(graphs) == {2: 0.93, 4: 0.5, 16: 0.97}
    follow(graphs, former)
    assert shares(graphs) == {2: 0.85, 4: 0.85, 16: 0.93}


@pytest.mark.parametrize(
    ("started", "wanted", "line"),
    [
        ({"policy": "xshare"}, TIGHT, "graphs of 2, 4, 16 rows: add = "),
        ({"policy": "xshare", "k0": 1, "add": 6}, TIGHT, "graphs of 2 rows: captured without a selection"),
        (TIGHT, {"policy": "xshare", "k0": 1, "mass": 0.5}, "graphs of 2, 4, 16 rows: mass = 0.5"),
        (TIGHT, {"policy": "oea", "k0": 2, "kmax": 6}, "graphs of 2, 4, 16 rows: kmax = 6"),
        (TIGHT, {"policy": "pruned", "k0": 1}, "graphs of 2, 4, 16 rows: coverage = 'own'"),
        ({"policy": "oea", "k0": 2, "kmax": 6}, VANILLA, "kmax = 6 columns"),
        (TIGHT | {"min_rows": 4}, TIGHT, "graphs of 2 rows: captured without a selection"),
        (TIGHT | {"layers": {"1": VANILLA}}, TIGHT, "graphs of 2, 4, 16 rows: captured without a selection"),
        (TIGHT, {"policy": "observe"}, "the plans that observe compares have changed since the capture"),
        ({"policy": "observe"}, TIGHT, "the plans that observe compares have changed since the capture"),
        (STATIC, STATIC | {"budget": 5}, "the captured plan's numbers are fixed, because no buffer holds them"),
    ],
)
def test_what_graphs_cannot_follow_is_told_by_size(started, wanted, line):
    graphs, former, _ = capture(started)
    numbers = read(graphs)
    reason = describe_misfits(graphs.find_changes(make_plans(wanted)).misfits)
    assert re.search(line, reason)
    assert "\n" not in reason
    assert read(graphs) == numbers
    assert not graphs.find_changes(former).misfits


def test_vanilla_and_back_by_numbers_alone():
    graphs, former, layers = capture(TIGHT)
    vanilla = make_plans(VANILLA)
    follow(graphs, vanilla)
    opened = open_up(make_plans(TIGHT).find(layers[0], StepKey("decode", 16)).plan, layers[0].router)
    assert set(map(tuple, read(graphs).values())) == {tuple(encode(opened).tolist())}
    follow(graphs, former)
    assert read(graphs) == read(capture(TIGHT)[0])


@pytest.mark.parametrize(
    "wanted",
    [{"policy": "xshare", "k0": 1, "add": 0}, {"policy": "xshare", "k0": 1, "add": 24}, VANILLA],
    ids=["without a step", "nothing to change in small batches", "vanilla"],
)
def test_captured_anew_after_a_switch_they_follow_as_before(wanted):
    """A kernel of the plan in force would have left out what the next switch asks for."""
    graphs, former, layers = capture(TIGHT)
    selecting = graphs.selecting
    plans, more = make_plans(wanted), make_plans({"policy": "xshare", "k0": 1, "add": 6})
    follow(graphs, plans)
    numbers = read(graphs)
    for (layer_id, rows), plan in capture_anew(graphs, plans, layers).items():
        assert plan is former.find(layers[layer_id], StepKey("decode", rows)).plan
    assert (read(graphs), graphs.selecting) == (numbers, selecting)
    for follower in (more, former):
        follow(graphs, follower)
        plans = follower
    assert read(graphs) == read(capture(TIGHT)[0])


@pytest.mark.parametrize("keys", [{}, {"acceptance": 0.5}, {"warm_rows": 1}])
def test_graphs_that_read_how_deep_drafts_are_go_on_asking(keys):
    """Captured anew under vanilla, which does not ask, they do what they did at first."""
    layer, step = Layer(0, Config(), None), Step("verify", 4, Batch(tokens_per_request=4))
    schedule = build_schedule("xshare", {"k0": 1, "add": 1, **keys}, speculative=True)
    plans, graphs = InForce(schedule, BATCHES), Graphs()
    for others in (plans, InForce(None, BATCHES)):
        [assignment] = graphs.begin_capture(step.key, replace(others, layers=[layer]))
        assert assignment.plan is plans.find(layer, step.key).plan
        assert graphs.by_depth == plans.by_depth == bool(keys)


def test_an_estimate_is_written_where_a_plan_asks_for_one():
    """And what is in force says which: also after a switch, and in no graph that a number of its own was written to."""
    keys = {"k0": 1, "add": 1, "acceptance": "auto"}
    layers = bind(Model(2))
    step, graphs = Step("verify", 4, Batch(tokens_per_request=4)), Graphs()

    def make(**more: Any) -> InForce:
        return InForce(build_schedule("xshare", keys | more, speculative=True), BATCHES)

    def find(plans: InForce, layer: Layer) -> SelectionPlan:
        plan = plans.find(layer, step.key).plan
        assert plan is not None
        return plan

    def expect(plans: InForce) -> None:
        assert read(graphs) == {(layer.layer_id, 4): encode(find(plans, layer)).tolist() for layer in layers}

    plans = make()
    run(graphs, plans, layers, step)
    graphs.begin_capture(step.key, replace(plans, layers=layers))
    for more, acceptance in (({}, 0.75), ({"layers": {"1": {"acceptance": 0.5}}}, 0.25), ({"acceptance": 1.0}, 0.5)):
        others = make(**more)
        graphs.follow(graphs.find_changes(others))
        expect(others)
        graphs.weigh(others, acceptance)
        assert others.schedule is not None
        plans = InForce(others.schedule.weigh(acceptance), BATCHES)
        expect(plans)
    assert [find(plans, layer).acceptance for layer in layers] == [1.0, 1.0]
    graphs.follow(graphs.find_changes(InForce(None, BATCHES)))
    numbers = read(graphs)
    graphs.weigh(InForce(None, BATCHES), 0.5)
    assert read(graphs) == numbers


def test_what_an_eager_step_left_is_made_anew():
    """A size that was not captured after all: the next capture has the numbers of its own plan."""
    graphs, former, layers = Graphs(), make_plans(TIGHT), [Layer(0, Config(), None)]
    run(graphs, former, layers, Step("decode", 16, Batch()))
    plans = make_plans({"policy": "xshare", "k0": 3, "add": 2})
    follow(graphs, plans)
    run(graphs, plans, layers, Step("decode", 16, Batch()))
    record(graphs, plans, layers, 16)
    assert read(graphs) == {(0, 16): encode(plans.find(layers[0], StepKey("decode", 16)).plan).tolist()}


def test_what_an_eager_step_left_has_the_estimate_at_its_capture():
    auto = {"policy": "xshare", "k0": 1, "add": 3, "acceptance": "auto"}
    graphs, former, layers = Graphs(), make_plans(auto), [Layer(0, Config(), None)]
    run(graphs, former, layers, Step("decode", 16, Batch()))
    graphs.weigh(former, 0.25)
    plans = InForce(former.schedule.weigh(0.25), BATCHES)
    run(graphs, plans, layers, Step("decode", 16, Batch()))
    record(graphs, plans, layers, 16)
    assert read(graphs) == {(0, 16): encode(plans.find(layers[0], StepKey("decode", 16)).plan).tolist()}


def test_the_same_policy_at_another_estimate_is_no_other_for_graphs_without_numbers():
    """Where torch selects: they go on as they were captured."""
    auto = {"policy": "custom", "k0": 1, "budget": 4, "scope": "request", "acceptance": "auto"}
    graphs, former, _ = capture(auto)
    assert not read(graphs)
    graphs.weigh(former, 0.25)  # which has nowhere to write it
    assert not graphs.find_changes(InForce(former.schedule.weigh(0.25), BATCHES)).misfits
    [reason] = graphs.find_changes(make_plans(auto | {"budget": 5})).misfits
    assert "no buffer holds" in reason


def test_a_step_takes_a_graph_that_is_captured_later():
    graphs, plans, layers = capture(TIGHT)
    key = StepKey("decode", 3)
    assert graphs.find_key(key).rows == 4
    record(graphs, plans, layers, 3)
    assert graphs.find_key(key) == key
    drafting = [StepKey("verify", 4, 2), StepKey("verify", 8, 4)]
    graphs.captured |= {key: {} for key in drafting}
    assert [graphs.find_key(StepKey("verify", 4, tokens)) for tokens in (2, 4)] == drafting
    assert graphs.find_key(StepKey("verify", 3)) == StepKey("verify", 3), "a graph of decode steps is none of it"


def test_without_graphs_every_switch_is_free():
    assert not Graphs().find_changes(make_plans({"policy": "observe"})).misfits


@pytest.mark.parametrize("started", [{"policy": "oea", "k0": 2, "kmax": 6}, STATIC, {"policy": "observe"}])
def test_to_vanilla_a_graph_that_cannot_follow_goes_stale(started):
    """And it follows again once the policy comes back, since what it launches was not touched."""
    graphs, former, _ = capture(started)
    numbers, stale = read(graphs), {StepKey("decode", rows) for rows in graphs.selecting}
    graphs.follow(graphs.find_changes(make_plans(VANILLA)))
    assert (graphs.stale, read(graphs)) == (stale, numbers)
    follow(graphs, former)
    assert not graphs.stale


def test_a_stale_graph_that_is_captured_anew_is_vanilla():
    """As in a weight update: it does what is in force, and may be replayed."""
    graphs, _, layers = capture({"policy": "observe"})
    vanilla = make_plans(VANILLA)
    graphs.follow(graphs.find_changes(vanilla))
    for rows in ROWS:
        assert [assignment.plan for assignment in record(graphs, vanilla, layers, rows)] == [None] * 2
    assert not graphs.stale
    assert not graphs.find_changes(vanilla).misfits


def test_a_stale_graph_that_is_captured_anew_reads_its_numbers_from_a_buffer():
    """So a server that masks padding needs no capture for another plan of the same kernel."""
    graphs, _, layers = capture({"policy": "oea", "k0": 2, "kmax": 6})
    masking = replace(make_plans({"policy": "vanilla"}), masks=True, batches=Batches(ROWS, always_pad=True))
    graphs.follow(graphs.find_changes(masking))
    for rows in ROWS:
        run(graphs, masking, layers, Step("decode", rows, Batch()))
        record(graphs, masking, layers, rows)
    assert not graphs.find_changes(make_plans({"policy": "pruned", "k0": 1})).misfits
