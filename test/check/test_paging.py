"""What check says of paged experts: page-ins against a plain recount, captured sizes, transfers, bad input."""

import json
from collections import OrderedDict
from itertools import count

import pytest
import torch

from benchmark.gpu.models import COMMON, CONFIGS
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.check import command, paging
from sglang_xshare.check.weights import read_weights
from sglang_xshare.cli import main
from sglang_xshare.policies import bounds
from sglang_xshare.policies.schedule import build_schedule

POLICY = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
KEYS = {"k0": 1, "add": 4, "utility": "squared", "own_share": 0.75}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COMMON | CONFIGS["qwen3-30b-a3b"]))
    return tmp_path


@pytest.fixture
def say(monkeypatch, model, capsys):
    """Call it with flags; returns the exit code and what was printed. SGLang is not asked: it would serve."""
    monkeypatch.setattr(command, "_judge", lambda *_: ({"sglang": None, "gpu": "a GPU", "served": True}, None))
    monkeypatch.setattr(paging, "STEPS", 12)

    def run(*flags):
        status = main(["check", "--model", str(model), *map(str, flags)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def recount(plan, rows, slots, common, top_k=8, experts=128):
    """Page-ins a layer and step by a list of what was used, the latest last, and one draw after the other."""
    generator = torch.Generator().manual_seed(0)
    counted = []
    for _ in range(paging.LAYERS):
        shared = torch.randn(1, experts, generator=generator)
        used = OrderedDict.fromkeys(reversed(range(experts)))
        for step in range(paging.STEPS):
            own = torch.randn(rows, experts, generator=generator)
            resident = list(used)[-slots:]
            mask = torch.zeros(experts, dtype=torch.bool)
            mask[resident] = True
            logits = common**0.5 * shared + (1 - common) ** 0.5 * own
            found = select(logits, plan, Router(top_k), Batch(resident=mask, slots=slots), backend="reference")
            active = found.active.nonzero().flatten().tolist()
            missing = [expert for expert in active if expert not in resident]
            for expert in [one for one in active if one in resident] + missing:
                used.move_to_end(expert)
            if step >= paging.COLD:
                counted.append(len(missing))
    return sum(counted) / len(counted)


@pytest.mark.parametrize(("policy", "side"), [("vanilla", 0), ("xshare", 1)])
def test_page_ins_are_those_of_a_plain_recount(model, monkeypatch, policy, side):
    monkeypatch.setattr(paging, "STEPS", 12)
    schedule = build_schedule("xshare", dict(KEYS), speculative=False)
    found = paging._draw(schedule, read_weights(model), rows=4, slots=40, common=0.47)["page_ins"][side]
    plan = build_plan(policy, **(KEYS if side else {}))
    assert found == pytest.approx(
        recount(plan, 4, 40, 0.47), abs=0.3
    )  # experts used in one step may leave in any order


def test_slots_for_all_page_nothing_in(model):
    schedule = build_schedule("xshare", dict(KEYS), speculative=False)
    drawn = paging._draw(schedule, read_weights(model), rows=4, slots=128, common=0.0)
    assert drawn["page_ins"] == [0, 0]
    assert drawn["kept_mass"] == pytest.approx(1)


def test_graphs_are_captured_as_far_as_the_plan_guarantees():
    schedule = build_schedule("xshare", dict(KEYS), speculative=False)
    plan = build_plan("xshare", **KEYS)
    router = Router(8)
    first = next(n for n in count(1) if bounds.max_active(plan, router, 128, n, slots=40) > 40)
    assert paging.count_captured(schedule, 8, 128, 40) == first - 1 > 40 // 8
    assert paging.count_captured(schedule, 8, 128, 128) == paging.MOST_CAPTURED


def test_transfers_are_page_ins_over_the_link(say, model):
    status, out, _ = say(
        "--batch", 16, "--resident", 40, "--link", 50, "--bandwidth", 1000, "--compare", POLICY, "--json"
    )
    assert status == 0
    found = json.loads(out)["paging"]
    assert found["is_estimate"]
    assert found["captured"] == {"without a policy": 5, POLICY: 40}
    for row in found["policies"]:
        for page_ins, transfer, step in zip(row["page_ins"], row["transfer_ms"], row["step_ms"], strict=True):
            assert transfer == pytest.approx(page_ins * 48 * 9.437184 / 50)
            assert transfer < step < transfer + 60
        assert row["page_ins"][1] < row["page_ins"][0]
    twice = say("--batch", 16, "--resident", 40, "--compare", POLICY, "--json")[1]
    slower = json.loads(twice)["paging"]
    assert slower["link_gb_per_s"] == 25
    assert slower["policies"][0]["transfer_ms"][0] == pytest.approx(2 * found["policies"][0]["transfer_ms"][0])


def test_the_table_calls_it_an_estimate(say):
    status, out, _ = say("--batch", 16, "--resident", 40, "--gpu", "rtx4090", "--compare", POLICY)
    assert status == 0
    assert "ESTIMATE at 25 GB/s" in out
    assert "40 of each layer: with all else 21.20 GB " in out
    assert "without a policy" in out


def test_a_single_row_selects_where_a_server_would_have_it_select(say):
    flags = "--batch", 1, "--expert-policy", "oea:k0=2", "--compare", POLICY
    status, out, _ = say(*flags, "--resident", 40, "--json")
    assert status == 0
    assert [row["policy"] for row in json.loads(out)["paging"]["policies"][::2]] == ["oea:k0=2", POLICY]
    assert "a step of 1 rows stays vanilla (min_rows)" in say(*flags)[2]


@pytest.mark.parametrize("slots", [40, 128])
def test_free_residents_are_warned_of_where_all_experts_are_loaded(say, slots):
    out = say("--batch", 16, "--resident", slots, "--compare", f"{POLICY},free_residents=true", "--json")[1]
    warned = any("free_residents = True: all experts are loaded" in one["says"] for one in json.loads(out)["warnings"])
    assert warned == (slots == 128)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--resident", 40), "--resident without --batch:"),
        (("--batch", 4, "--link", 25), "--link 25 without --resident:"),
        (("--batch", 4, "--resident", 4), "--resident 4:"),
        (("--batch", 4, "--resident", 129), "--resident 129:"),
        (("--batch", 4, "--resident", "x"), "--resident x:"),
        (("--batch", 4, "--resident", 40, "--link", 0), "--link 0:"),
    ],
)
def test_bad_input_is_one_line(say, flags, message):
    status, _, err = say(*flags)
    assert status == 1
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_server_is_judged_with_the_flags_that_page(monkeypatch, model):
    asked = []
    monkeypatch.setattr(
        command, "_judge", lambda given, *_: asked.append(given) or ({"sglang": None, "served": True}, None)
    )
    main(["check", "--model", str(model), "--batch", "4", "--resident", "40", "--compare", POLICY])
    assert asked[0][-3:] == ["--enable-paged-experts", "--paged-experts-num-resident", "40"]
