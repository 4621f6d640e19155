"""What a request may ask for beyond a text: a grammar, several answers, beams, routed experts; and its end before time.

One server without a policy, one with, and one that speculates. Small batches run at full budget, large ones at a budget
that drops experts, as the number of rows decides.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import requests

from benchmark.common.server import Server
from served import host
from served.answers import LAYERS, NEW_TOKENS, make_server, policy, read_lines, read_metrics, read_prompts
from served.eagle import DRAFT_TOKENS, TOP_K, eagle, select_again
from served.probe import read_logits
from served.release import LATEST
from sglang_xshare import Router, build_plan, select

pytestmark = pytest.mark.long

SMALL, LARGE = 8, 16
"""Requests at once: at most the former run at full budget."""
BUDGET = {"policy": "xshare", "k0": 1, "add": 8}
PRUNED = {"policy": "pruned", "k0": 2}
"""At LARGE, for the empty slots it leaves."""
FULL = {"policy": "xshare", "k0": 1, "add": 64, "utility": "full"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["leaf", "branch"]}, "name": {"type": "string", "maxLength": 6}},
    "required": ["kind", "name"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "[abc]{8}x"},
    {"ebnf": 'root ::= ("yes" | "no") " " [0-9] [0-9] [0-9]'},
    {},
)
"""Of four requests side by side, the last without a grammar."""
BEAMS = 3
UNTIL_ABORTED, LONG = 6, 40
"""Tokens of a request that is aborted then, and of those beside it."""


def choose_plan(requests: int) -> dict[str, Any]:
    """What selects for so many rows, or requests that are verified."""
    return FULL if requests <= SMALL else PRUNED if requests == LARGE else BUDGET


def by_requests(tokens: int = 1) -> tuple[str, ...]:
    """The flags for that, with so many rows a request."""
    return policy("xshare", k0=1, add=8, by_rows={f"1-{SMALL * tokens}": FULL, f"{LARGE * tokens}": PRUNED})


@dataclass(frozen=True)
class Visit:
    """What a server answered to everything below, and what was counted meanwhile."""

    constrained: dict[int, list[dict[str, Any]]]
    """By the number of requests; GRAMMARS in turn."""
    several: list[list[int]]
    beams: dict[int, list[dict[str, Any]]]
    """By the number of requests."""
    routed: dict[int, list[dict[str, Any]]]
    """By the number of requests, decoded in lockstep."""
    steps: dict[int, list[dict[str, Any]]]
    """The decode calls of the MoE runner meanwhile."""
    survivors: list[list[int]]
    """The tokens of requests beside which others were aborted."""
    aborted: list[list[int]]
    """As far as these came."""
    after: list[list[int]]
    """The tokens to the aborted requests' prompts, asked again."""
    records: list[dict[str, Any]]
    metrics: dict[str, float]
    running: float
    """Requests that the server believes to run or to wait, at the end."""
    log: str

    def calls(self, mode: str, least: int = 1) -> list[dict[str, Any]]:
        """The runner's calls in such forwards."""
        return [call for call in self.records if call["mode"] == mode and call["rows"] >= least]


@pytest.fixture(scope="session")
def visit(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Visit]:
    """Call it with a server's name below for what it answered; each runs once, and alone."""
    servers = {
        "off": (),
        "policy": by_requests(),
        "EAGLE-3": (*eagle(tiny_model), *by_requests(DRAFT_TOKENS)),
    }

    @cache
    def run(name: str) -> Visit:
        scratch = tmp_path_factory.mktemp("requests")
        host.install(scratch)
        flags = (*servers[name], "--enable-return-routed-experts", "--constrained-json-disable-any-whitespace")
        server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, scratch)
        with server:
            return ask_all(server, probe, read_prompts(tiny_model), has_beams=name != "EAGLE-3")

    return run


def ask_all(server: Server, probe: Path, prompts: Sequence[str], has_beams: bool) -> Visit:
    """Ask a running server for everything, one after another."""
    constrained = {size: ask_constrained(server, prompts[:size]) for size in (len(GRAMMARS), LARGE)}
    several = server.generate(prompts[:2], n=3, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    beams = {
        size: server.generate(prompts[:size], beam_width=BEAMS, n=BEAMS, max_new_tokens=NEW_TOKENS)
        for size in ((2, 4) if has_beams else ())
    }
    routed, steps = {}, {}
    for size in (SMALL, LARGE):
        routed[size], steps[size] = ask_routed(server, probe, prompts[:size])
    survivors, aborted = ask_and_abort(server, prompts[:SMALL])
    after = generate_tokens(server, prompts[:SMALL], LONG)
    records = read_lines(probe)
    metrics = read_metrics(server, sum(call["layer"] == 0 for call in records))
    running = re.findall(r"^sglang:num_(?:running|queue)_reqs\{.*\} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return Visit(
        constrained,
        [answer["output_ids"] for answer in several],
        beams,
        routed,
        steps,
        survivors,
        aborted,
        after,
        records,
        metrics,
        sum(map(float, running)),
        server.log_text(),
    )


def generate_tokens(server: Server, prompts: Sequence[str], count: int) -> list[list[int]]:
    """So many tokens to each prompt."""
    return [answer["output_ids"] for answer in server.generate(prompts, max_new_tokens=count, ignore_eos=True)]


def ask_constrained(server: Server, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Greedy answers under GRAMMARS in turn, as one batch."""
    sampling = [{"temperature": 0.0, "max_new_tokens": 60, **GRAMMARS[i % len(GRAMMARS)]} for i in range(len(prompts))]
    answers: list[dict[str, Any]] = server.post("/generate", {"text": list(prompts), "sampling_params": sampling})
    return answers


def ask_routed(server: Server, probe: Path, prompts: Sequence[str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Answers with their routed experts, and the decode calls meanwhile: in lockstep, unless the server speculates."""
    for _ in range(5):
        server.post("/flush_cache", {})
        seen = len(read_lines(probe))
        wanted = {"return_routed_experts": True}
        answers = server.generate(prompts, wanted, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        calls = [call for call in read_lines(probe)[seen:] if call["mode"] in ("DECODE", "TARGET_VERIFY")]
        if {call["rows"] for call in calls} == {len(prompts)} or "spec_verify_ct" in answers[0]["meta_info"]:
            return answers, calls
    raise AssertionError(f"never {len(prompts)} requests in lockstep")


def ask_and_abort(server: Server, prompts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Three of the requests end early, by a command or as their client leaves: (the others' tokens, theirs)."""

    def leave(number: int) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
        body = {"text": prompts[number], "rid": f"left-{number}", "stream": True, "sampling_params": sampling}
        tokens: list[int] = []
        asked, reason = False, {}
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    tokens, reason = said["output_ids"], said["meta_info"]["finish_reason"]
                if len(tokens) >= UNTIL_ABORTED and not asked:
                    if number == 0:
                        return tokens  # the client hangs up
                    server.post("/abort_request", {"rid": f"left-{number}"})
                    asked = True
        assert reason["type"] == "abort"
        return tokens

    with ThreadPoolExecutor(len(prompts)) as threads:
        left = [threads.submit(leave, number) for number in range(3)]
        stayed = [threads.submit(generate_tokens, server, [prompt], LONG) for prompt in prompts[3:]]
        return [one.result()[0] for one in stayed], [one.result() for one in left]


def read_routed(answer: dict[str, Any]) -> np.ndarray:
    """[tokens but the last, layers, top-k] expert ids as reported."""
    text = answer["meta_info"]["routed_experts"]
    return np.frombuffer(pybase64.b64decode(text), dtype=np.int32).reshape(-1, LAYERS, TOP_K)


with_a_policy = pytest.mark.parametrize("name", ["policy", "EAGLE-3"])


@with_a_policy
@pytest.mark.parametrize("size", [len(GRAMMARS), LARGE])
def test_constrained_answers_obey_their_grammar(size, name, visit):
    answers = visit(name).constrained[size]
    assert len(answers) == size
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
def test_constrained_answers_at_full_budget_are_those_without_a_policy(name, visit):
    size = len(GRAMMARS)
    expected = [answer["output_ids"] for answer in visit("off").constrained[size]]
    assert [answer["output_ids"] for answer in visit(name).constrained[size]] == expected


@with_a_policy
def test_several_answers_at_full_budget_are_those_without_a_policy(name, visit):
    assert visit(name).several == visit("off").several
    assert len(visit(name).several) == 6


def test_beams_at_full_budget_are_those_without_a_policy(visit):
    for answer, expected in zip(visit("policy").beams[2], visit("off").beams[2], strict=True):
        beams, others = (one["meta_info"]["beam_results"] for one in (answer, expected))
        assert [beam["output_ids"] for beam in beams] == [beam["output_ids"] for beam in others]
        assert len(beams) == BEAMS


def test_every_beam_is_a_row_of_the_selection(visit):
    """Upstream adds the members of a beam behind the requests' rows."""
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
def test_requests_beside_aborted_ones_answer_as_without_a_policy(name, visit):
    expected = visit("off").after
    assert visit("off").survivors == expected[3:]
    assert visit(name).survivors == expected[3:]


@with_a_policy
def test_aborted_requests_leave_nothing_behind(name, visit):
    """What they said until then was right, the server goes on, and none of them still runs."""
    expected = visit("off").after
    for tokens, whole in zip(visit(name).aborted, expected, strict=False):
        assert UNTIL_ABORTED <= len(tokens) < 400
        assert tokens[:LONG] == whole[: len(tokens)]
    assert visit(name).after == expected
    assert visit(name).running == 0
    assert "Scheduler hit an exception" not in visit(name).log


def test_routed_experts_at_full_budget_are_those_without_a_policy(visit):
    for answer, expected in zip(visit("policy").routed[SMALL], visit("off").routed[SMALL], strict=True):
        assert answer["output_ids"] == expected["output_ids"]
        assert (np.sort(read_routed(answer)) == np.sort(read_routed(expected))).all()


def test_without_a_policy_every_slot_is_reported_as_routed(visit):
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
