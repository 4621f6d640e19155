"""What the host launches of the Triton kernel: with a stand-in for the kernel, and which options all kernels share."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_xshare
from selection.cases import spell
from selection.launched import Dispatched, kernel
from sglang_xshare import Batch, Router, RunnerSlots, select, selection
from sglang_xshare.selection.triton_kernel import launch, recipe, supports, tile
from sglang_xshare.stage.layer import FILLED, MASKED, Layer
from sglang_xshare.stage.step import Step
from sglang_xshare.types import SCORINGS
from stage.fake import put_in_step

__all__ = ["kernel"]
PHASES = {  # of each plan, where programs cannot wait for each other
    "xshare": [1, 3],
    "lynx-acc:confidence=0.5": [0, 1, 3],
    "moe-spec:budget=16,coverage=truncate": [1, 2, 3],
}


@pytest.mark.parametrize("text", PHASES)
def test_phases(kernel, monkeypatch, text):
    """One program is one plain launch, several are one cooperative launch; without a counter each phase is a launch."""
    for rows in (16, 128):
        select(torch.zeros(rows, 128), spell(text), Router(8), backend="triton")
    assert kernel.phases == [(1, 0, 3, False), (16, 0, 3, True)]
    kernel.launches.clear()
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: None)
    select(torch.zeros(128, 128), spell(text), Router(8), backend="triton")
    assert kernel.phases == [(16, phase, phase, False) for phase in PHASES[text]]


def test_programs_that_a_gpu_does_not_hold_together_have_no_barrier(monkeypatch):
    """Nor has a launch in a capture without counters, which would become 0 only in a replay. Launches that overlap take
    different counters.
    """
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=72))
    assert launch._find_counter(device, 72) is None
    counters = torch.zeros(launch.COUNTERS, launch.CACHE_LINE, dtype=torch.int32)
    monkeypatch.setitem(launch._counters, device, counters)
    assert launch._find_counter(device, 73) is None
    found = {launch._find_counter(device, 72).data_ptr() for _ in range(launch.COUNTERS)}
    assert len(found) == launch.COUNTERS


def launch_once(kernel, route):
    """Return what a call returns, which launches the kernel once, and nothing of torch's."""
    route()  # the plan's numbers go to the device once
    kernel.launches.clear()
    with Dispatched() as dispatched:
        outputs = route()
    assert dispatched.operations == []
    assert len(kernel.launches) == 1
    return outputs


@pytest.mark.parametrize("text", PHASES)
@pytest.mark.parametrize("rows", [16, 64])
def test_a_layer_is_one_launch(kernel, rows, text):
    """Whatever the runner takes, with exact rows and residents."""
    flags, resident = torch.ones(rows, dtype=torch.bool), torch.ones(128, dtype=torch.bool)
    call = torch.zeros(rows, 128, dtype=torch.bfloat16), spell(text), Router(8), Batch(flags, 1, flags, resident, 64)
    shared, masked = RunnerSlots(shared=1, shared_weight=0.4), RunnerSlots(masked=True)
    for slots in (None, RunnerSlots(), shared, *([] if "truncate" in text else [masked])):
        launch_once(kernel, lambda slots=slots: select(*call, backend="triton", slots=slots))


@pytest.mark.parametrize(("shared", "masked"), [(1, False), (0, True)])
def test_a_layer_of_the_stage_is_one_launch(kernel, monkeypatch, shared, masked):
    """DeepSeek-V3's router with its fused shared expert, and gpt-oss's for a runner that ranks logits itself."""
    from sglang.srt.layers.moe.topk import TopKConfig, TopKOutputFormat

    groups = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4, "scoring_func": "sigmoid"}
    keys = {"correction_bias": torch.zeros(128), **groups} if shared else {}
    monkeypatch.setattr("sglang_xshare.stage.layer.num_shared_slots", lambda config: shared)
    config = TopKConfig(top_k=8 + shared, renormalize=True, **keys)
    layer = Layer(0, config, None, convention=MASKED if masked else FILLED, runner_ranks_logits=masked)
    put_in_step(layer, spell("xshare"), Step("decode", 16, Batch(torch.ones(16, dtype=torch.bool))))
    monkeypatch.setattr(selection, "_choose_backend", lambda *args: "triton")
    logits = torch.zeros(16, 128)

    def route():
        if masked:
            return layer.prepare(TopKOutputFormat.TRITON_KERNEL, logits)[1:]
        return layer.choose(logits, logits, 8 + shared, True)

    shapes = [output.shape for output in launch_once(kernel, route)]
    assert shapes == ([(16, 128)] if masked else [(16, 9)] * 2)


def test_a_batch_is_cut_once_for_all_layers_and_steps_of_a_size(kernel, monkeypatch):
    """What the kernel serves and how it is launched is asked for each layer and step; a tile takes the host longest."""
    monkeypatch.setattr(
        selection, "_choose_backend", lambda logits, *given: "triton" if supports(*given, *logits.shape) else "torch"
    )
    tile._cut.cache_clear()
    recipe._serves.cache_clear()
    plans = spell("xshare"), spell("xshare:add=8")
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
    call = spell("custom:k0=1,add=3"), Router(4, "sigmoid"), Batch(), 6, 16
    assert supports(*call)
    monkeypatch.setattr(recipe, "SCORED", ("softmax",))
    assert not supports(*call)


def test_every_launch_has_the_options():
    """Every call of `kernel[grid]`, and every call with `kernel[grid]` among its arguments, passes the options."""
    found = {}
    for path in Path(sglang_xshare.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and any("kernel[" in ast.unparse(part) for part in [call.func, *call.args]):
                found[f"{path.name}:{call.lineno}"] = "**OPTIONS" in map(ast.unparse, call.keywords)
    assert found
    assert all(found.values()), found
