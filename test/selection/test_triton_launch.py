"""What the host launches of the Triton kernel: with a stand-in for the kernel, and which options all kernels share."""

import ast
from pathlib import Path

import pytest
import torch

import sglang_xshare
from selection.launched import Dispatched, kernel
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select, selection
from sglang_xshare.selection.triton_kernel import launch, recipe, supports, tile
from sglang_xshare.stage.layer import FILLED, MASKED, Layer
from sglang_xshare.stage.step import Step
from sglang_xshare.types import SCORINGS
from stage.fake import put_in_step

__all__ = ["kernel"]
PLANS = {
    "adding": build_plan("xshare"),
    "voting": build_plan("lynx-acc", confidence=0.5),
    "rescuing": build_plan("moe-spec", budget=16, coverage="truncate"),
}


def run(rows, experts=128, plan="adding"):
    return select(torch.zeros(rows, experts), PLANS[plan], Router(8), Batch(), backend="triton")


@pytest.mark.parametrize("plan", PLANS)
def test_one_program_is_one_plain_launch(kernel, plan):
    run(16, plan=plan)
    assert kernel.phases == [(1, 0, 3, False)]


@pytest.mark.parametrize("plan", PLANS)
def test_several_programs_are_one_cooperative_launch(kernel, plan):
    run(128, plan=plan)
    assert kernel.phases == [(16, 0, 3, True)]


@pytest.mark.parametrize(("plan", "phases"), [("adding", [1, 3]), ("voting", [0, 1, 3]), ("rescuing", [1, 2, 3])])
def test_without_a_counter_each_phase_is_a_launch(kernel, monkeypatch, plan, phases):
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: None)
    run(128, plan=plan)
    assert kernel.phases == [(16, phase, phase, False) for phase in phases]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    "slots",
    [None, RunnerSlots(), RunnerSlots(shared=1, shared_weight=0.4), RunnerSlots(masked=True)],
    ids=["bare", "filled", "shared", "masked"],
)
def test_a_layer_is_one_launch(kernel, rows, slots, plan):
    """Whatever the runner takes, with exact rows and residents: the kernel is launched once, and torch nothing."""
    if plan.coverage == "truncate" and slots is not None and slots.masked:
        return
    flags, resident = torch.ones(rows, dtype=torch.bool), torch.ones(128, dtype=torch.bool)
    call = torch.zeros(rows, 128, dtype=torch.bfloat16), plan, Router(8), Batch(flags, 1, flags, resident, 64)
    select(*call, backend="triton", slots=slots)  # the plan's numbers go to the device once
    kernel.launches.clear()
    with Dispatched() as dispatched:
        select(*call, backend="triton", slots=slots)
    assert dispatched.operations == []
    assert len(kernel.launches) == 1


@pytest.mark.parametrize(("shared", "masked"), [(1, False), (0, True)])
def test_a_layer_of_the_stage_is_one_launch(kernel, monkeypatch, shared, masked):
    """DeepSeek-V3's router with its fused shared expert, and gpt-oss's for a runner that ranks logits itself."""
    from sglang.srt.layers.moe.topk import TopKConfig, TopKOutputFormat

    groups = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4, "scoring_func": "sigmoid"}
    keys = {"correction_bias": torch.zeros(128), **groups} if shared else {}
    monkeypatch.setattr("sglang_xshare.stage.layer.num_shared_slots", lambda config: shared)
    config = TopKConfig(top_k=8 + shared, renormalize=True, **keys)
    layer = Layer(0, config, None, convention=MASKED if masked else FILLED, routes_itself=masked)
    put_in_step(layer, build_plan("xshare"), Step("decode", 16, Batch(torch.ones(16, dtype=torch.bool))))
    monkeypatch.setattr(selection, "_choose_backend", lambda *args: "triton")
    logits = torch.zeros(16, 128)

    def route():
        if masked:
            return layer.prepare(TopKOutputFormat.TRITON_KERNEL, logits)[1:]
        return layer.choose(logits, logits, 8 + shared, True)

    route()
    kernel.launches.clear()
    with Dispatched() as dispatched:
        outputs = route()
    assert dispatched.operations == []
    assert len(kernel.launches) == 1
    assert [output.shape for output in outputs] == ([(16, 128)] if masked else [(16, 9)] * 2)


def test_a_batch_is_cut_once_for_all_layers_and_steps_of_a_size(kernel, monkeypatch):
    """What the kernel serves and how it is launched is asked for each layer and step; a tile takes the host longest."""
    monkeypatch.setattr(
        selection, "_choose_backend", lambda logits, *given: "triton" if supports(*given, *logits.shape) else "torch"
    )
    tile._cut.cache_clear()
    recipe._serves.cache_clear()
    plans = build_plan("xshare"), build_plan("xshare", add=8)
    layers = [Router(8, scaling=scaling) for scaling in (1.0, 2.0, 3.0)]
    for plan in plans:
        for rows in (16, 24):
            for router in layers * 5:
                select(torch.zeros(rows, 128), plan, router)
    assert len(kernel.launches) == 2 * 2 * 3 * 5
    assert tile._cut.cache_info().misses == 2
    assert recipe._serves.cache_info().misses == 2 * 2


def test_a_score_that_the_kernel_does_not_know_is_left_to_torch(monkeypatch):
    """Such as a score of a later router."""
    assert set(SCORINGS) == set(recipe.SCORED)
    plan, router = build_plan("custom", k0=1, add=3), Router(4, "sigmoid")
    assert supports(plan, router, Batch(), 6, 16)
    monkeypatch.setattr(recipe, "SCORED", ("softmax",))
    assert not supports(plan, router, Batch(), 6, 16)


PACKAGE = Path(sglang_xshare.__file__).parent


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)


def find_launches(node: ast.AST, kernels: set[str]) -> list[ast.Call]:
    """Calls of `kernel[grid]`, or of something that is given it."""

    def launches(part: ast.expr) -> bool:
        return isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id in kernels

    return [
        call for call in ast.walk(node) if isinstance(call, ast.Call) and any(map(launches, [call.func, *call.args]))
    ]


def test_every_launch_has_the_options():
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    kernels = {node.name for tree in trees.values() for node in ast.walk(tree) if is_kernel(node)}
    found = {
        f"{path.name}:{call.lineno}": ["**OPTIONS" for key in call.keywords if ast.unparse(key) == "**OPTIONS"]
        for path, tree in trees.items()
        for call in find_launches(tree, kernels)
    }
    assert found
    assert all(options == ["**OPTIONS"] for options in found.values()), found
