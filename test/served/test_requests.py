"""What a request may ask for beyond a text: a grammar, several answers, beams, routed experts; and its end before time.

One server without a policy, one with, and one that speculates. Small batches run at full budget, large ones at a budget
that drops experts, as the number of rows decides.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pybase64
import pytest

from served import host
from served.answers import LAYERS, NEW_TOKENS, make_server, policy, read_prompts
from served.eagle import DRAFT_TOKENS, TOP_K, eagle, select_again
from served.probe import read_logits
from served.release import LATEST
from served.visits import BEAMS, GRAMMARS, LARGE, LONG, SMALL, UNTIL_ABORTED, ask_all
from sglang_xshare import Router, build_plan, select

pytestmark = pytest.mark.long

BUDGET = {"policy": "xshare", "k0": 1, "add": 8}
PRUNED = {"policy": "pruned", "k0": 2}
"""At LARGE, for the empty slots it leaves."""
FULL = {"policy": "xshare", "k0": 1, "add": 64, "utility": "full"}


def choose_plan(requests: int) -> dict[str, Any]:
    """What selects for so many rows, or requests that are verified."""
    return FULL if requests <= SMALL else PRUNED if requests == LARGE else BUDGET


def by_requests(tokens: int = 1) -> tuple[str, ...]:
    """The flags for that, with so many rows a request."""
    return policy("xshare", k0=1, add=8, by_rows={f"1-{SMALL * tokens}": FULL, f"{LARGE * tokens}": PRUNED})


@pytest.fixture(scope="session")
def visit(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], SimpleNamespace]:
    """Call it with a server's name below for what it answered; each runs once, and alone."""
    servers = {"off": (), "policy": by_requests(), "EAGLE-3": (*eagle(tiny_model), *by_requests(DRAFT_TOKENS))}

    @cache
    def run(name: str) -> SimpleNamespace:
        scratch = tmp_path_factory.mktemp("requests")
        host.install(scratch)
        flags = (*servers[name], "--enable-return-routed-experts", "--constrained-json-disable-any-whitespace")
        server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, scratch)
        with server:
            return ask_all(server, probe, read_prompts(tiny_model), has_beams=name != "EAGLE-3")

    return run


def read_routed(answer: dict[str, Any]) -> np.ndarray:
    """[tokens but the last, layers, top-k] expert ids as reported."""
    text = answer["meta_info"]["routed_experts"]
    return np.frombuffer(pybase64.b64decode(text), dtype=np.int32).reshape(-1, LAYERS, TOP_K)


with_a_policy = pytest.mark.parametrize("name", ["policy", "EAGLE-3"])


@with_a_policy
@pytest.mark.parametrize("size", [len(GRAMMARS), LARGE])
def test_constrained_answers_obey_their_grammar(size, name, visit):
    """At full budget they are those without a policy."""
    answers = visit(name).constrained[size]
    assert len(answers) == size
    if size == len(GRAMMARS):
        tokens, expected = ([one["output_ids"] for one in visit(who).constrained[size]] for who in (name, "off"))
        assert tokens == expected
    for number, answer in enumerate(answers):
        kind, text = number % len(GRAMMARS), answer["text"]
        if kind == 0:
            said = json.loads(text)
            assert said.keys() == {"kind", "name"}
            assert said["kind"] in ("leaf", "branch")
            assert len(said["name"]) <= 6
        elif kind == 1:
            assert re.fullmatch("[abc]{8}x", text)
        elif kind == 2:
            assert re.fullmatch("(yes|no) [0-9]{3}", text)
        if GRAMMARS[kind]:
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@with_a_policy
def test_several_answers_at_full_budget_are_those_without_a_policy(name, visit):
    assert visit(name).several == visit("off").several
    assert len(visit(name).several) == 6


def test_beams_at_full_budget_are_those_without_a_policy_and_each_is_a_row_of_the_selection(visit):
    """Upstream adds the members of a beam behind the requests' rows."""
    for answer, expected in zip(visit("policy").beams[2], visit("off").beams[2], strict=True):
        beams, others = (one["meta_info"]["beam_results"] for one in (answer, expected))
        assert [beam["output_ids"] for beam in beams] == [beam["output_ids"] for beam in others]
        assert len(beams) == BEAMS
    assert {len(answer["meta_info"]["beam_results"]) for answer in visit("policy").beams[4]} == {BEAMS}
    calls = visit("policy").calls("DECODE")
    for size in (2, 4):
        assert size * BEAMS in {call["rows"] for call in calls}


@with_a_policy
def test_every_step_selects_and_is_counted(name, visit):
    """Requests end one by one here, and not all in decoding: the policy must see every batch as it is."""
    mode, tokens = ("DECODE", 1) if name == "policy" else ("TARGET_VERIFY", DRAFT_TOKENS)
    calls = visit(name).calls(mode, least=2)
    plans = {rows: choose_plan(rows // tokens) for rows in {call["rows"] for call in calls}}
    assert {plan["policy"] for plan in plans.values()} == {"xshare", "pruned"}
    for call in calls[::7]:  # every layer comes
        assert call["active"] == select_again(call, plans[call["rows"]], tokens)
    metrics = visit(name).metrics
    assert metrics["steps policy"] == len(calls) / LAYERS
    assert metrics["steps min_rows"] == (len(visit(name).calls(mode)) - len(calls)) / LAYERS
    assert metrics["steps no_context"] == metrics["steps override"] == metrics["steps unchanged"] == 0
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
    assert metrics["experts_before_total"] == sum(call["before"] for call in calls)


@with_a_policy
def test_aborted_requests_leave_nothing_behind(name, visit):
    """What they said until then was right, those beside them answer as without a policy, and none still runs."""
    expected = visit("off").after
    assert visit("off").survivors == visit(name).survivors == expected[3:]
    for tokens, whole in zip(visit(name).aborted, expected, strict=False):
        assert UNTIL_ABORTED <= len(tokens) < 400
        assert tokens[:LONG] == whole[: len(tokens)]
    assert visit(name).after == expected
    assert visit(name).running == 0
    assert "Scheduler hit an exception" not in visit(name).log


def test_routed_experts_at_full_budget_are_those_without_a_policy(visit):
    """Without a policy every slot is reported as routed."""
    for answer, expected in zip(visit("policy").routed[SMALL], visit("off").routed[SMALL], strict=True):
        assert answer["output_ids"] == expected["output_ids"]
        assert (np.sort(read_routed(answer)) == np.sort(read_routed(expected))).all()
    for answer in visit("off").routed[LARGE]:
        assert all(len(set(row)) == TOP_K for row in read_routed(answer).reshape(-1, TOP_K).tolist())


def test_routed_experts_are_those_selected(visit):
    """In their order, and -1 in an empty slot."""
    answers, calls = visit("policy").routed[LARGE], visit("policy").steps[LARGE]
    prompts = [answer["meta_info"]["prompt_tokens"] for answer in answers]
    reported = [read_routed(answer) for answer in answers]
    assert [len(ids) for ids in reported] == [count + NEW_TOKENS - 1 for count in prompts]
    dropped = 0
    for number, call in enumerate(calls):
        step, layer = divmod(number, LAYERS)
        assert call["layer"] == layer
        rows = [ids[count + step, layer] for ids, count in zip(reported, prompts, strict=True)]
        chosen = select(read_logits(call), build_plan(PRUNED), Router(TOP_K), backend="reference").topk_ids
        assert Counter(tuple(row.tolist()) for row in rows) == Counter(tuple(row.tolist()) for row in chosen)
        dropped += int((chosen < 0).sum())
    assert dropped > 0
    for ids, count in zip(reported, prompts, strict=True):
        assert all(len(set(row)) == TOP_K for row in ids[:count].reshape(-1, TOP_K).tolist()), "prefill"
