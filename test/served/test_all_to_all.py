"""All-to-all expert parallelism: every rank routes rows of its own, and selects among them or among those of all.

`served.all_to_all` does what DeepEP does, without a GPU. Its probe sees the rows of all ranks, and on each rank the
experts that it holds.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from served.answers import LAYERS, policy
from served.eagle import CHAIN, DRAFT_TOKENS, TOP_K, eagle
from served.probe import read_logits
from served.ranks import (
    FOUR,
    OLD_TWO,
    PER_REQUEST,
    TWO,
    TWO_OF_TWO,
    XSHARE,
    Answers,
    check_load,
    experts,
    keys_of,
    live,
)
from served.release import OLDEST
from sglang_xshare import Batch, Router, Selection, build_plan, select

# Ranks that decide differently wait for each other forever: that must fail a test, not the whole run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEEPEP = ("--moe-a2a-backend", "deepep")


def list_selections(
    call: Mapping[str, Any], plan: Mapping[str, Any], tokens_per_request: int, alone: bool
) -> Iterator[tuple[Selection, int]]:
    """(reference selection, its live rows) of the rows of all ranks, or of each alone, where one row is vanilla."""
    logits, valid = read_logits(dict(call)), live(dict(call))
    counts = call["padded"] if alone else [len(logits)]
    for own, there in zip(logits.split(counts), valid.split(counts), strict=True):
        keys = plan if len(own) > 1 else {"policy": "vanilla"}
        batch = Batch(there, tokens_per_request)
        yield select(own, build_plan(dict(keys)), Router(TOP_K), batch, backend="reference"), int(there.sum())


def check_steps(answers: Answers, plan: Mapping[str, Any], tokens_per_request: int = 1, alone: bool = False) -> None:
    """The ranks run the experts that the reference selects over live rows; the first counts for all, or itself."""
    lost = after = rows = 0
    for calls in answers.steps:
        assert (
            len({(call["layer"], call["rows"], call["prefills"], call["logits"]) for call in calls if "logits" in call})
            <= 1
        )
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


def test_ranks_select_among_the_rows_of_all(ranked):
    served = ranked(*keys_of(XSHARE), *TWO, *DEEPEP)
    check_load(served)
    check_steps(served, XSHARE)
    assert served.metrics["steps policy"] == len(served.selecting) / LAYERS


def test_ranks_of_the_oldest_release_select_among_the_rows_of_all(ranked):
    served = ranked(*keys_of(XSHARE), *OLD_TWO, *DEEPEP, release=OLDEST)
    check_load(served)
    check_steps(served, XSHARE)


def test_ranks_without_a_row_take_part(ranked):
    """Of four ranks, where few have requests, the others have not even padding."""
    served = ranked(*keys_of(XSHARE | {"min_rows": 1}), *FOUR, *DEEPEP)
    check_load(served)
    check_steps(served, XSHARE)
    assert any(0 in calls[0]["padded"] for calls in served.selecting)


def test_ranks_select_among_the_rows_of_their_own(ranked):
    served = ranked(*keys_of(XSHARE | {"rows": "rank"}), *TWO, *DEEPEP)
    check_load(served)
    check_steps(served, XSHARE, alone=True)


def test_ranks_divide_the_rows_of_a_batch(ranked):
    """With two tensor-parallel ranks to one of data-parallel attention, each routes half of its rows."""
    served = ranked(*keys_of(XSHARE), *TWO_OF_TWO, *DEEPEP)
    check_load(served)
    check_steps(served, XSHARE)


def test_verification_groups_by_request_across_ranks(ranked, tiny_model):
    served = ranked(*eagle(tiny_model, CHAIN), *keys_of(PER_REQUEST), *TWO, *DEEPEP)
    check_load(served)
    check_steps(served, PER_REQUEST, DRAFT_TOKENS)


def test_full_budget_answers_as_without_a_policy(ranked):
    served = ranked(*policy("xshare", k0=1, add=64, utility="full"), *TWO, *DEEPEP)
    assert served.tokens == ranked(*TWO, *DEEPEP).tokens == ranked(*TWO).tokens
    assert served.metrics["steps policy"] > 0
