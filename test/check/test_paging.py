"""What check says of paged experts: page-ins against a plain recount, captured sizes, transfers, bad input."""

import json
from collections import OrderedDict
from itertools import count

import pytest
import torch

from check.asking import QWEN, say
from refused import read_refusal
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.check import active
from sglang_xshare.check.active import draw_loads
from sglang_xshare.check.estimate import MOST_CAPTURED, count_captured
from sglang_xshare.check.weights import read_weights
from sglang_xshare.policies import bounds
from sglang_xshare.policies.schedule import build_schedule

pytestmark = pytest.mark.usefixtures("served")
POLICY = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
KEYS = {"k0": 1, "add": 4, "utility": "squared", "own_share": 0.75}


PAGED = ("--enable-paged-experts", "--paged-experts-num-resident")


@pytest.fixture(autouse=True)
def model(monkeypatch, write):
    """The model's folder; few steps are drawn."""
    monkeypatch.setattr(active, "STEPS", 12)
    return write(QWEN)


def draw(model, slots, common):
    schedule = build_schedule("xshare", dict(KEYS), speculative=False)
    return draw_loads(schedule, read_weights(model).model, 4, 1, common, slots=slots)


def recount(plan, rows, slots, common, top_k=8, experts=128):
    """Page-ins a layer and step by a list of what was used, the latest last, and one draw after the other."""
    generator = torch.Generator().manual_seed(0)
    counted = []
    for _ in range(active.PAGED_LAYERS):
        shared = torch.randn(1, experts, generator=generator)
        used = OrderedDict.fromkeys(reversed(range(experts)))
        for step in range(active.STEPS):
            own = torch.randn(rows, experts, generator=generator)
            resident = list(used)[-slots:]
            mask = torch.zeros(experts, dtype=torch.bool)
            mask[resident] = True
            logits = common**0.5 * shared + (1 - common) ** 0.5 * own
            found = select(logits, plan, Router(top_k), Batch(resident=mask, slots=slots), backend="reference")
            loaded = found.active.nonzero().flatten().tolist()
            missing = [expert for expert in loaded if expert not in resident]
            for expert in [one for one in loaded if one in resident] + missing:
                used.move_to_end(expert)
            if step >= active.COLD:
                counted.append(len(missing))
    return sum(counted) / len(counted)


@pytest.mark.parametrize(("policy", "side"), [("vanilla", "before"), ("xshare", "after")])
def test_page_ins_are_those_of_a_plain_recount(model, policy, side):
    found = getattr(draw(model, 40, 0.47), side).page_ins
    plan = build_plan(policy, **(KEYS if side == "after" else {}))
    # Experts used in one step may leave in any order.
    assert found == pytest.approx(recount(plan, 4, 40, 0.47), abs=0.3)


def test_slots_for_all_page_nothing_in(model):
    drawn = draw(model, 128, 0.0)
    assert (drawn.before.page_ins, drawn.after.page_ins) == (0, 0)
    assert drawn.kept_mass == pytest.approx(1)


def test_graphs_are_captured_as_far_as_the_plan_guarantees(model):
    schedule, weights = build_schedule("xshare", dict(KEYS), speculative=False), read_weights(model)
    plan = build_plan("xshare", **KEYS)
    first = next(n for n in count(1) if bounds.max_active(plan, Router(8), 128, n, slots=40) > 40)
    assert count_captured(schedule, weights, 40) == first - 1 > 40 // 8
    assert count_captured(schedule, weights, 128) == MOST_CAPTURED


@pytest.mark.parametrize(("gpu", "link"), [(None, 25), ("rtx4090", 25), ("h100", 50), ("mi300x", 50)])
def test_transfers_are_page_ins_over_the_link_of_the_gpu(model, capsys, gpu, link):
    named = ("--gpu", gpu) if gpu else ()
    paged = (*PAGED, 40, "--batch", 16, "--bandwidth", 1000, "--compare", POLICY)
    assert say("--model", model, *paged, *named, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["paging"] == {"slots": 40, "captured": {"without a policy": 5, POLICY: 40}}
    assert report["estimate"]["link_gb_per_s"] == link
    for row in report["estimate"]["estimates"]:
        assert row["is_estimate"]
        for page_ins, transfer, step in zip(row["page_ins"], row["transfer_ms"], row["step_ms"], strict=True):
            assert transfer == pytest.approx(page_ins * 48 * 9.437184 / link)
            assert transfer < step < transfer + 60
        assert row["page_ins"][1] < row["page_ins"][0]


def test_the_table_calls_it_an_estimate(model, capsys):
    paged = (*PAGED, 40, "--batch", 16, "--gpu", "rtx4090", "--compare", POLICY)
    assert say("--model", model, *paged) == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in (
        "ESTIMATE, not a measurement",
        "page-ins",
        "a link of 25 GB/s",
        "21.20 GB on each GPU",
        "left for the",
    ):
        assert said in out
    assert "experts in slots 40 of each layer; decode graphs up to so many requests: 5 (without a policy)" in out


def test_slots_that_the_gpu_has_no_room_for_do_not_fit(model, capsys):
    assert say("--model", model, *PAGED, 120, "--gpu", "rtx4090", "--batch", 4, "--json") == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["verdict"] == "does not fit"
    assert 40 < report["memory"]["resident_experts"] < 120
    assert err == "check: not answered: the time of a step: the weights do not fit\n"


def test_a_single_row_selects_where_a_server_would_have_it_select(model, capsys):
    flags = ("--model", model, "--batch", 1, "--expert-policy", "oea:k0=2", "--compare", POLICY)
    assert say(*flags, *PAGED, 40, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["estimate"]["estimates"]
    assert [row["policy"] for row in rows[::2]] == ["oea:k0=2", POLICY]
    assert say(*flags) == 1
    assert "a step of 1 rows stays vanilla (min_rows)" in read_refusal(capsys)


@pytest.mark.parametrize("slots", ["4", "x", "0"])
def test_bad_input_is_one_line(model, capsys, slots):
    assert say("--model", model, *PAGED, slots, "--batch", 4) == 1
    assert read_refusal(capsys).startswith(f"check: --paged-experts-num-resident {slots}: ")
