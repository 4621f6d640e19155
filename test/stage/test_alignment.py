"""Upstream's fused Triton runner gets the slots that the selection has sorted, and only where they are its own."""

from pathlib import Path

import pytest
import torch

from served.release import interpret, older_releases_take_long, run_script
from sglang_xshare import RunnerSlots
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.alignment import Aligner
from sglang_xshare.stage.forward import wrap_model
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.stage import PolicyBypassed, Stage
from sglang_xshare.types import Alignment
from stage.fake import Config, Model, forward_batch

UPSTREAM = (torch.tensor([9]), torch.tensor([9]), torch.tensor([9]))
IDS = torch.zeros(6, 4, dtype=torch.int32)


def upstream(ids, block_size, num_experts):
    """Stands in for `moe_align_block_size`."""
    return UPSTREAM


def make_alignment(block_size=16):
    return Alignment(*(torch.zeros(1, dtype=torch.int32) for _ in range(3)), block_size)


@older_releases_take_long
def test_upstreams_runner_computes_the_same_from_sorted_slots(release, patched_release):
    """Its own kernels, interpreted: upstream sorts the first batch of every size, and none after it."""
    batches = run_script(Path(__file__).with_name("run_moe_runner.py"), interpret(patched_release(release)))
    assert len(batches) == 13
    for batch in batches:
        assert batch["error"] < 3e-3, batch  # it multiplies in fp16
    assert sum(batch["size"] > 0.5 for batch in batches[:-1]) == 10
    seen = set()
    for batch in batches[:-1]:
        assert batch["sorted by upstream"] == (batch["rows"] not in seen), batch
        seen.add(batch["rows"])
    assert batches[-1]["sorted by upstream"] == 1


def test_block_size_is_learned_for_each_size_of_a_batch():
    aligner = Aligner()
    assert aligner.slots(6) == RunnerSlots(None)
    aligner.offer(IDS, 32, None)
    assert aligner.align(upstream, False, IDS, 16, 32) is UPSTREAM
    assert aligner.slots(6) == RunnerSlots(16)
    assert aligner.slots(7) == RunnerSlots(None)


def test_sorted_slots_are_handed_over_for_the_same_memory():
    aligner, alignment = Aligner(), make_alignment()
    aligner.offer(IDS, 32, alignment)
    for ids in (IDS, IDS.view(6, 4)):
        found = aligner.align(upstream, False, ids, 16, 32)
        assert found == (alignment.sorted_slots, alignment.block_experts, alignment.num_sorted)


@pytest.mark.parametrize(
    ("ids", "block_size", "experts"),
    [(IDS.clone(), 16, 32), (IDS[:3], 16, 32), (IDS, 64, 32), (IDS, 16, 33)],
    ids=["other memory", "fewer rows", "another block size", "other experts"],
)
def test_anything_else_is_upstreams_to_sort(ids, block_size, experts):
    aligner = Aligner()
    aligner.offer(IDS, 32, make_alignment())
    assert aligner.align(upstream, False, ids, block_size, experts) is UPSTREAM


def test_a_down_projection_by_tma_takes_upstreams_slots(caplog):
    """It has a row for every block that all experts could need, and refuses slots that are fewer."""
    aligner = Aligner()
    for alignment in (None, make_alignment(), None):
        aligner.offer(IDS, 32, alignment)
        assert aligner.align(upstream, True, IDS, 16, 32) is UPSTREAM
        assert aligner.slots(6) == RunnerSlots(None)
    assert aligner.unasked == 0
    assert [line.getMessage() for line in caplog.records] == [
        "--expert-policy-align: SGLang sorts the slots of 6 rows itself: its down projection loads by TMA"
    ]


def test_a_plan_the_kernel_does_not_serve_is_said_once(caplog):
    aligner = Aligner()
    for _ in range(4):
        aligner.offer(IDS, 32, None)
        assert aligner.align(upstream, False, IDS, 16, 32) is UPSTREAM
    assert len(caplog.records) == 1
    assert "SGLang sorts the slots of 6 rows itself: the kernel does not serve" in caplog.text
    assert aligner.served == 0


def test_every_selection_must_be_asked_for():
    aligner = Aligner()
    for asked in (False, True):
        aligner.offer(IDS, 32, None)
        if asked:
            aligner.align(upstream, False, IDS, 16, 32)
            aligner.align(upstream, False, IDS, 16, 32)
    assert aligner.unasked == 1


def test_nothing_routed_yet():
    assert Aligner().align(upstream, False, IDS, 16, 32) is UPSTREAM


def make_stage(model, align=True):
    layers = [Layer(number, config, None) for number, config in enumerate(model.configs)]
    stage = Stage(layers, build_schedule("xshare", {"add": 2}, speculative=False), device="cpu", align=align)
    wrap_model(model, stage)
    return stage


def test_a_runner_that_never_asks_stops_the_server(monkeypatch):
    """Such as one that got other ids, or sorts by itself: the flag would do nothing."""
    model = Model()
    model.logits = torch.randn(6, 32)
    stage = make_stage(model)
    monkeypatch.setattr("sglang_xshare.hooks._stage", stage)
    with pytest.raises(PolicyBypassed, match="--expert-policy-align: the MoE runner did not ask"):
        model.forward(None, None, forward_batch("decode", 6))
    model.forward(None, None, forward_batch("prefill", 6))


def test_a_runner_that_asks_is_served(monkeypatch):
    model = Model(1)
    model.logits = torch.randn(6, 32)
    stage = make_stage(model)
    monkeypatch.setattr("sglang_xshare.hooks._stage", stage)
    asked = []

    def ask_for(ids):
        asked.append(stage.align(upstream, False)(ids, 16, 32))

    original = model.configs[0]
    layer = stage.layers[0]
    choose = layer.choose
    layer.config = Config(custom_routing_function=lambda *args: (lambda out: (ask_for(out[1]), out)[1])(choose(*args)))
    stage._by_config = {id(original): layer}
    model.forward(None, None, forward_batch("decode", 6))
    assert asked == [UPSTREAM]
    assert stage.aligner.slots(6) == RunnerSlots(16)


def test_without_the_flag_upstream_is_left_alone():
    stage = make_stage(Model(), align=False)
    assert stage.align(upstream, False) is upstream
