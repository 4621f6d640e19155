"""The real server with paged experts, on a CPU: vanilla answers as unpaged, a policy prefers what is loaded."""

import pytest
import torch

from served.answers import generate_together, policy, read_all, read_lines, say_together
from served.probe import read_logits
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client

EXPERTS, SLOTS, TOP_K = 64, 24, 8
PLAN = {"k0": 1, "add": 3, "utility": "squared", "own_share": 0.75}


def paged(slots):
    """The flags of a server with so many slots a layer."""
    return "--enable-paged-experts", "--paged-experts-num-resident", str(slots)


def test_paged_answers_and_counts(served, small_server, prompts):
    """One server: routed as the model does under `observe`, then switched."""
    server, probe, trace = small_server(*paged(SLOTS), *policy("observe", plans=["xshare:k0=1,add=3"]))
    with server:
        answers = [say_together(server, probe, prompts[:size]) for size in (16, 16, 1)]
        assert answers == served("unpatched").tokens
        records, found = read_all(server, probe)
        observed = read_calls(probe)
        assert found["page_ins_total"] == found["page_ins_before_total"] == sum(call["page_ins"] for call in observed)

        answer = server.post(PATH, {"policy": "xshare", **PLAN})
        assert answer["in_force"]["min_rows"] == 1
        for size in (16, 4, 1):
            generate_together(server, probe, prompts[:size])
        read_all(server, probe)
        calls = read_calls(probe, len(records))
        counted = Client(server.url).get_policy()["since_switch"]
        log = server.log_text()
    check_calls(calls)
    assert counted["page_ins"] == sum(call["page_ins"] for call in calls)
    assert counted["page_ins_before"] == sum(count_own(call) for call in calls)
    assert counted["page_ins"] < 0.5 * counted["page_ins_before"]
    assert sum(layer["page_ins"] for layer in counted["by_layer"]) == counted["page_ins"]
    assert ", page-ins: " in log
    records = [record for record in read_lines(trace) if record.get("switch")]
    assert [record["page_ins"] for record in records] == [call["page_ins"] for call in calls]
    assert max(record["experts_after"] for record in records) <= SLOTS


def read_calls(probe, first=0):
    """What decode steps did, a record a layer and step."""
    return [call for call in read_lines(probe)[first:] if call["mode"] == "DECODE"]


def check_calls(calls):
    """Every step is the reference's on what was loaded, and no more than its experts were paged in."""
    plan, router = build_plan("xshare", **PLAN), Router(TOP_K)
    for call in calls:
        loaded = torch.zeros(EXPERTS, dtype=torch.bool)
        loaded[call["resident"]] = True
        batch = Batch(resident=loaded, slots=SLOTS)
        wanted = select(read_logits(call), plan, router, batch, backend="reference").active
        assert call["active"] == wanted.nonzero().flatten().tolist()
        assert len(call["active"]) <= SLOTS
        assert call["page_ins"] == int((wanted & ~loaded).sum())


def count_own(call):
    """What the model's own routing would have paged in."""
    own = select(read_logits(call), build_plan("vanilla"), Router(TOP_K), backend="reference").active
    return len(set(own.nonzero().flatten().tolist()) - set(call["resident"]))


@pytest.mark.long
@pytest.mark.parametrize("slots", [TOP_K, 32])
def test_vanilla_answers_as_unpaged(slots, served, asked):
    answers = asked(*paged(slots))
    assert answers.tokens == served("unpatched").tokens
    assert answers.metrics == {}


@pytest.mark.long
def test_with_slots_for_all_a_policy_answers_as_unpaged(served, asked):
    answers = asked(*paged(EXPERTS), *policy("xshare", k0=1, add=8, min_rows=2))
    assert answers.tokens == served("xshare").tokens
    assert answers.metrics["experts_after_total"] == served("xshare").metrics["experts_after_total"]
