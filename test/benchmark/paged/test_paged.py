"""The command that measures paged experts offline, small and for real, and the slots."""

import pytest
import torch

from benchmark.common.paths import TRAINED
from benchmark.common.record import read_record
from benchmark.paged import __main__ as command
from benchmark.paged.report import BY_LAYER, UNIFORM
from benchmark.paged.slots import PagedLayer
from benchmark.quality.model import load_model
from sglang_xshare import Batch, Router, build_plan

SIZES = ["--per-domain", "4", "--prompt", "16", "--steps", "8", "--batches", "2"]


def test_page_ins_and_loss_for_real_and_nothing_more_when_it_is_resumed(tmp_path, monkeypatch):
    arguments = [UNIFORM[0], BY_LAYER[0], *SIZES, "--batch", "2", "8", "--slots", "16", "64", "--out", str(tmp_path)]
    command.main(arguments)
    points = list(read_record(tmp_path / "paged.json", "paged")["points"].values())
    assert len(points) == 2 * 2 * 3
    found = {(one["rows"], one["slots"], one["policy"]): one for one in points}
    for rows in (2, 8):
        vanilla, policy = (found[rows, 16, name] for name in ("vanilla", UNIFORM[0]))
        assert vanilla["page_ins"] == vanilla["page_ins_before"] > policy["page_ins"] > 0
        assert policy["page_ins_before"] > policy["page_ins"]
        assert policy["active_experts"] <= 16
        assert vanilla["loss"]["delta"] == 0
        whole = found[rows, 64, UNIFORM[0]]
        assert (whole["page_ins"], whole["kept_mass"]) == (0, pytest.approx(1))
        assert whole["loss"]["delta"] == pytest.approx(0, abs=1e-5)
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured again"))
    command.main([*arguments, "--resume"])


def test_layers_have_plans_of_their_own():
    model = load_model(TRAINED)
    assert [plan.add for plan in command.list_plans(model, BY_LAYER[0], 16)] == [2, 2, 4, 8]
    assert command.list_plans(model, UNIFORM[0], 1)[0].add == 4  # one row can gain here


EXPERTS, TOP_K, ROWS, STEPS = 16, 4, 3, 20
ROUTER = Router(TOP_K)
PLAN = build_plan("xshare", k0=1, add=1, utility="squared", own_share=0.75)


def draw(seed=0):
    """Router logits of some steps that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, 1, EXPERTS, generator=generator)
    return common + torch.randn(STEPS, ROWS, EXPERTS, generator=generator)


@pytest.mark.parametrize("plan", [build_plan("vanilla"), PLAN])
def test_recency_keeps_what_was_used_last(plan):
    slots = 12  # as many as three rows take
    layer = PagedLayer(slots)
    used = list(reversed(range(slots, EXPERTS))) + list(range(slots))  # the latest last
    for logits in draw():
        residents = used[-slots:]
        found = layer(logits, plan, ROUTER, Batch())
        active = found.active.nonzero().flatten().tolist()
        missing = [expert for expert in active if expert not in residents]
        vanilla = set(logits.topk(TOP_K).indices.flatten().tolist())
        assert layer.page_ins[-1] == len(missing)
        assert layer.page_ins_before[-1] == len(vanilla - set(residents))
        used = [expert for expert in used if expert not in active]
        used += [expert for expert in active if expert in residents] + missing


def test_selection_prefers_what_is_loaded():
    layer, blind = (PagedLayer(8) for _ in range(2))
    told = build_plan("xshare", k0=1, add=4, free_residents=False, utility="squared", own_share=0.75)
    for logits in draw():
        found = layer(logits, PLAN, ROUTER, Batch())
        assert found.active.sum() <= 8
        blind(logits, told, ROUTER, Batch())
    assert sum(layer.page_ins) < sum(blind.page_ins)
