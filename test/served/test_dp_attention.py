"""Data-parallel attention: every rank serves requests of its own, and the MoE layers see the rows of all. With an
all-to-all backend every rank routes rows of its own, and selects among them or among those of all: `served.all_to_all`
does what DeepEP does, without a GPU. Its probe sees the rows of all ranks, and on each rank the experts that it holds.
"""

import pytest
import torch

from served.answers import LAYERS, policy
from served.eagle import CHAIN, DRAFT_TOKENS, TOP_K, compute, eagle
from served.probe import read_logits
from served.ranks import FOUR, OLD_TWO, PER_REQUEST, TWO, TWO_OF_TWO, XSHARE, check_load, experts, keys_of, live
from served.release import LATEST, OLDEST
from sglang_xshare import Batch, Router, build_plan, select

# Ranks that decide differently wait for each other forever: that must fail a test, not the whole run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEEPEP = ("--moe-a2a-backend", "deepep")
PER_RANK = {"policy": "xshare", "k0": 1, "target_per_rank": 5}
RANK_OF_EXPERT = [expert // 16 for expert in range(64)]


def check_steps(answers, plan, tokens_per_request=1):
    """Every rank runs the experts that the reference selects over the live rows of all, counted once."""
    before = after = told = 0
    for calls in answers.steps:
        assert len({(call["layer"], call["rows"], call["prefills"]) for call in calls}) == 1, "ranks are in step"
    for calls in answers.selecting:
        first = calls[0]
        assert len({call["logits"] for call in calls}) == 1, "every rank's router sees the same rows"
        selection = compute(first, plan, Batch(live(first), tokens_per_request))
        for call in calls:
            assert call["active"] == experts(selection.active)
        told += not selection.active.equal(compute(first, plan, Batch(None, tokens_per_request)).active)
        before += int(selection.vanilla_active.sum())
        after += len(first["active"])
    assert told > 0, "some step would have selected otherwise with its padding rows"
    assert 0 < after < before
    for calls in answers.steps:
        assert not calls[0]["prefills"] or all(call["after"] == call["before"] for call in calls)
    steps = answers.selecting
    assert answers.metrics["layer_steps_total"] == len(steps)
    assert answers.metrics["experts_before_total"] == before
    assert answers.metrics["experts_after_total"] == after
    assert answers.metrics["rows_total"] == sum(sum(calls[0]["own"]) for calls in steps)
    assert answers.metrics["steps policy"] == len(steps) / LAYERS
    assert answers.metrics["steps prefill"] == (len(answers.steps) - len(steps)) / LAYERS
    traced = [(record["batch_size"], record["experts_after"]) for record in answers.trace]
    assert traced == [(sum(calls[0]["own"]), calls[0]["after"]) for calls in steps]


def list_selections(call, plan, tokens_per_request, alone):
    """(reference selection, its live rows) of the rows of all ranks, or of each alone, where one row is vanilla."""
    logits, valid = read_logits(dict(call)), live(dict(call))
    counts = call["padded"] if alone else [len(logits)]
    for own, there in zip(logits.split(counts), valid.split(counts), strict=True):
        keys = plan if len(own) > 1 else {"policy": "vanilla"}
        batch = Batch(there, tokens_per_request)
        yield select(own, build_plan(dict(keys)), Router(TOP_K), batch, backend="reference"), int(there.sum())


def check_dispatched(answers, plan, tokens_per_request=1, alone=False):
    """The ranks run the experts that the reference selects over live rows; the first counts for all, or itself."""
    lost = after = rows = 0
    for calls in answers.steps:
        told = {(call["layer"], call["rows"], call["prefills"], call["logits"]) for call in calls if "logits" in call}
        assert len(told) <= 1
    for calls in answers.selecting:
        found = list(list_selections(calls[0], plan, tokens_per_request, alone))
        active = torch.stack([selection.active for selection, _ in found]).any(0)
        assert sorted(expert for call in calls for expert in call["active"]) == experts(active)
        first, there = found[0]
        lost += int(first.vanilla_active.sum() - first.active.sum())
        if not alone or calls[0]["padded"][0] > 1:
            after += int(first.active.sum())
            rows += there
    assert lost > 0
    assert answers.metrics["experts_after_total"] == after
    assert answers.metrics["rows_total"] == rows
    assert answers.metrics["steps prefill"] == (len(answers.steps) - len(answers.selecting)) / LAYERS


CASES = {
    "all": (XSHARE, TWO, LATEST),
    "oldest release": (XSHARE, OLD_TWO, OLDEST),
    "verification": (PER_REQUEST, TWO, LATEST),  # it does not mix: the others wait idle while a rank prefills
    "four": (XSHARE | {"min_rows": 1}, FOUR, LATEST),  # one request is gathered as one row, not as four
    "own": (XSHARE | {"rows": "rank"}, TWO, LATEST),
    "two of two": (XSHARE, TWO_OF_TWO, LATEST),  # which divide the rows of a batch
}


@pytest.mark.parametrize(
    ("case", "dispatched"), [*((name, False) for name in list(CASES)[:4]), *((name, True) for name in CASES)]
)
def test_ranks_select_as_the_reference(case, dispatched, ranked, tiny_model):
    """Among the rows of all, or with an all-to-all backend also among those of its own."""
    keys, ranks, release = CASES[case]
    drafts, more = eagle(tiny_model, CHAIN) if keys == PER_REQUEST else (), DEEPEP if dispatched else ()
    served = ranked(*drafts, *keys_of(keys), *ranks, *more, release=release)
    plan, tokens = PER_REQUEST if drafts else XSHARE, DRAFT_TOKENS if drafts else 1
    check_load(served)
    if dispatched:
        check_dispatched(served, plan, tokens, alone=case == "own")
    else:
        check_steps(served, plan, tokens)
    if case == "all" and dispatched:
        assert served.metrics["steps policy"] == len(served.selecting) / LAYERS
    elif case == "all":
        assert served.metrics["rank_comparisons_total"] >= 3
        assert served.metrics["rank_disagreements_total"] == 0
        prefills = [{call["mode"] for call in calls} for calls in served.steps if calls[0]["prefills"]]
        assert {"EXTEND", "DECODE"} in prefills, "a rank's decode was vanilla while another prefilled"
    rows_by_rank = [calls[0]["padded"] for calls in served.selecting]
    if case == "four" and dispatched:
        assert any(0 in padded for padded in rows_by_rank)
    elif case == "four":
        assert {sorted(padded) == [0, 0, 0, 1] for padded in rows_by_rank} == {True, False}
        assert any(len(set(padded)) == 1 for padded in rows_by_rank)
    if case == "verification" and not dispatched:
        assert {call["mode"] for calls in served.selecting for call in calls} == {"TARGET_VERIFY", "IDLE"}


def test_full_budget_answers_as_unpatched(ranked):
    """Two ranks of tensor parallelism in each of two groups: its verification has one in each."""
    served = ranked(*policy("xshare", k0=1, add=64, utility="full"), *TWO_OF_TWO)
    unpatched = ranked(*TWO, patched=False)
    check_load(unpatched)
    assert not any(call["stage"] for calls in unpatched.steps for call in calls)
    assert served.tokens == unpatched.tokens
    assert served.metrics["steps policy"] == len(served.selecting) / LAYERS > 0


def test_full_budget_verifies_as_unpatched_without_speculation(ranked, tiny_model):
    served = ranked(*eagle(tiny_model, CHAIN), *policy("xshare", k0=1, add=64, utility="full"), *TWO)
    wanted = ranked(*TWO, patched=False).tokens
    # A request may end within a verified draft: upstream hands out what it has.
    assert [tokens[: len(own)] for tokens, own in zip(served.tokens, wanted, strict=True)] == wanted


def test_each_expert_parallel_rank_loads_its_share(ranked):
    """With as many attention-DP as expert-parallel ranks, upstream cannot return the experts' outputs on CPU."""
    served = ranked(*keys_of(PER_RANK), *TWO_OF_TWO, "--ep-size", "4")
    check_load(served)
    for calls in served.selecting:
        selection = compute(calls[0], PER_RANK, Batch(live(calls[0])), RANK_OF_EXPERT)
        active = experts(selection.active)
        shares = [[expert for expert in active if RANK_OF_EXPERT[expert] == rank] for rank in range(4)]
        assert [call["active"] for call in calls] == shares
    together = sum(call["after"] for calls in served.selecting for call in calls)
    assert served.metrics["experts_after_total"] == together > 0


def test_dispatched_at_full_budget_it_answers_as_unpatched(ranked):
    served = ranked(*policy("xshare", k0=1, add=64, utility="full"), *TWO, *DEEPEP)
    assert served.tokens == ranked(*TWO, *DEEPEP).tokens == ranked(*TWO, patched=False).tokens
    assert served.metrics["steps policy"] > 0
