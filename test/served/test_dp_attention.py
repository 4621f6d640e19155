"""Data-parallel attention: every rank serves requests of its own, and the MoE layers see the rows of all. With an
all-to-all backend every rank routes rows of its own, and selects among them or among those of all: `served.all_to_all`
does what DeepEP does, without a GPU. Its probe sees the rows of all ranks, and on each rank the experts that it holds.
"""

from typing import Any

import pytest
import torch

from served.answers import FULL, LAYERS
from served.eagle import CHAIN, DRAFT_TOKENS, TOP_K, compute, eagle, experts
from served.probe import read_logits
from served.ranks import FOUR, OLD_TWO, PER_RANK, PER_REQUEST, TWO, TWO_OF_TWO, XSHARE, check_load, keys_of, live
from served.release import LATEST, OLDEST
from sglang_xshare import Batch, Router, build_plan, select

# Ranks that decide differently wait for each other forever: that must fail a test, not the whole run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEEPEP = ("--moe-a2a-backend", "deepep")
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


def test_ranks_select_alike_over_the_rows_of_all(ranked):
    served = ranked(*keys_of(XSHARE), *TWO)
    check_load(served)
    check_steps(served, XSHARE)
    prefills = [{call["mode"] for call in calls} for calls in served.steps if calls[0]["prefills"]]
    assert {"EXTEND", "DECODE"} in prefills, "a rank's decode was vanilla while another prefilled"
    assert served.metrics["rank_comparisons_total"] >= 3
    assert served.metrics["rank_disagreements_total"] == 0


def test_ranks_of_the_oldest_release_select_alike(ranked):
    served = ranked(*keys_of(XSHARE), *OLD_TWO, release=OLDEST)
    check_load(served)
    check_steps(served, XSHARE)


def test_four_ranks_select_alike_also_where_rows_are_not_padded(ranked):
    """One request on four ranks is gathered as one row, not as four."""
    served = ranked(*keys_of(XSHARE | {"min_rows": 1}), *FOUR)
    check_load(served)
    check_steps(served, XSHARE)
    rows_by_rank = [calls[0]["padded"] for calls in served.selecting]
    assert {sorted(padded) == [0, 0, 0, 1] for padded in rows_by_rank} == {True, False}
    assert any(len(set(padded)) == 1 for padded in rows_by_rank)


def test_full_budget_answers_as_unpatched(ranked):
    """Two ranks of tensor parallelism in each of two groups: the verification below has one in each."""
    served = ranked(*FULL, *TWO_OF_TWO)
    unpatched = ranked(*TWO, patched=False)
    check_load(unpatched)
    assert not any(call["stage"] for calls in unpatched.steps for call in calls)
    assert served.tokens == unpatched.tokens
    assert served.metrics["steps policy"] == len(served.selecting) / LAYERS > 0


def test_verification_groups_by_request_across_ranks(ranked, tiny_model):
    """Speculation does not mix: the others wait idle while a rank prefills."""
    served = ranked(*eagle(tiny_model, CHAIN), *keys_of(PER_REQUEST), *TWO)
    check_load(served)
    check_steps(served, PER_REQUEST, DRAFT_TOKENS)
    assert {call["mode"] for calls in served.selecting for call in calls} == {"TARGET_VERIFY", "IDLE"}


def test_full_budget_verifies_as_unpatched_without_speculation(ranked, tiny_model):
    served = ranked(*eagle(tiny_model, CHAIN), *FULL, *TWO)
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


DISPATCHED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "among the rows of all": (XSHARE, TWO, LATEST),
    "on the oldest release": (XSHARE, OLD_TWO, OLDEST),
    "with ranks that have not even padding": (XSHARE | {"min_rows": 1}, FOUR, LATEST),
    "among the rows of its own": (XSHARE | {"rows": "rank"}, TWO, LATEST),
    "with two ranks that divide the rows of a batch": (XSHARE, TWO_OF_TWO, LATEST),
}


@pytest.mark.parametrize("case", DISPATCHED)
def test_a_rank_selects_what_it_dispatches(case, ranked):
    keys, ranks, release = DISPATCHED[case]
    served = ranked(*keys_of(keys), *ranks, *DEEPEP, release=release)
    check_load(served)
    check_dispatched(served, XSHARE, alone="rows" in keys)
    if ranks == FOUR:
        assert any(0 in calls[0]["padded"] for calls in served.selecting)
    if keys == XSHARE and ranks == TWO:
        assert served.metrics["steps policy"] == len(served.selecting) / LAYERS


def test_dispatched_verification_groups_by_request_across_ranks(ranked, tiny_model):
    served = ranked(*eagle(tiny_model, CHAIN), *keys_of(PER_REQUEST), *TWO, *DEEPEP)
    check_load(served)
    check_dispatched(served, PER_REQUEST, DRAFT_TOKENS)


def test_dispatched_at_full_budget_it_answers_as_unpatched(ranked):
    served = ranked(*FULL, *TWO, *DEEPEP)
    assert served.tokens == ranked(*TWO, *DEEPEP).tokens == ranked(*TWO, patched=False).tokens
    assert served.metrics["steps policy"] > 0
