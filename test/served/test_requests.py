"""Requests with a grammar, several answers or beams, and requests that end before their time.

One server without a policy, one with, and one that speculates. Small batches run at full budget, large ones at a budget
that drops experts, as the number of rows decides.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import requests

from served.answers import LAYERS, NEW_TOKENS, greedy, make_server, policy, read_all, read_tokens
from served.eagle import DRAFT_TOKENS, eagle, select_again
from served.ranks import WIDE, XSHARE
from served.release import LATEST

pytestmark = pytest.mark.long

SMALL, LARGE = 8, 16
"""Requests at once: at most the former run at full budget."""
PROPERTIES = {"kind": {"enum": ["leaf", "branch"]}, "name": {"type": "string", "maxLength": 6}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["kind", "name"], "additionalProperties": False}
GRAMMARS: tuple[dict[str, str], ...] = (
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "[abc]{8}x"},
    {"ebnf": 'root ::= ("yes" | "no") " " [0-9] [0-9] [0-9]'},
    {},
)
"""The grammars of four requests side by side; the last request has none."""
BEAMS = 3
UNTIL_ABORTED, LONG = 6, 40
"""Tokens of a request that is aborted then, and of those beside it."""
PRUNED = {"policy": "pruned", "k0": 2}


def choose_plan(requests):
    """What selects for so many rows, or requests that are verified."""
    return WIDE if requests <= SMALL else PRUNED if requests == LARGE else XSHARE


def by_requests(tokens=1):
    """The flags for that, with so many rows a request."""
    return policy("xshare", k0=1, add=8, by_rows={f"1-{SMALL * tokens}": WIDE, f"{LARGE * tokens}": PRUNED})


def ask_all(server, probe, prompts, has_beams):
    """Return what a running server answers to everything, one after another, and what was counted meanwhile."""
    constrained = {size: ask_constrained(server, prompts[:size]) for size in (len(GRAMMARS), LARGE)}
    several = server.generate(prompts[:2], n=3, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    beams = {
        size: server.generate(prompts[:size], beam_width=BEAMS, n=BEAMS, max_new_tokens=NEW_TOKENS)
        for size in ((2, 4) if has_beams else ())
    }
    survivors, aborted = ask_and_abort(server, prompts[:SMALL])
    after = generate_tokens(server, prompts[:SMALL], LONG)
    records, metrics = read_all(server, probe)
    running = re.findall(r"^sglang:num_(?:running|queue)_reqs\{.*\} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return SimpleNamespace(
        constrained=constrained,  # by the number of requests; GRAMMARS in turn
        several=read_tokens(several),
        beams=beams,
        survivors=survivors,  # tokens of requests beside which others were aborted
        aborted=aborted,
        after=after,  # tokens to the aborted requests' prompts, sent again
        calls=lambda mode, least=1: [one for one in records if one["mode"] == mode and one["rows"] >= least],
        metrics=metrics,
        running=sum(map(float, running)),  # requests that the server believes to run or to wait, at the end
        log=server.log_text(),
    )


def generate_tokens(server, prompts, count):
    """Return `count` tokens of each prompt's answer."""
    return read_tokens(server.generate(prompts, max_new_tokens=count, ignore_eos=True))


def ask_constrained(server, prompts):
    """Greedy answers under GRAMMARS in turn, as one batch."""
    sampling = [{"temperature": 0.0, "max_new_tokens": 60, **GRAMMARS[i % len(GRAMMARS)]} for i in range(len(prompts))]
    return server.post("/generate", {"text": prompts, "sampling_params": sampling})


def ask_and_abort(server, prompts):
    """Three of the requests end early, by a command or as their client leaves: (the others' tokens, theirs)."""

    def leave(number):
        body = {"text": prompts[number], "rid": f"left-{number}", "stream": True, "sampling_params": greedy(400)}
        tokens, asked, reason = [], False, {}
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


@pytest.fixture(scope="session")
def visit(tiny_model, prompts, patched_release, tmp_path_factory):
    """Call it with a server's name below for what it answered; each runs once, and alone."""
    servers = {"off": (), "policy": by_requests(), "EAGLE-3": (*eagle(tiny_model), *by_requests(DRAFT_TOKENS))}

    @cache
    def run(name):
        flags = (*servers[name], "--constrained-json-disable-any-whitespace")
        server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, tmp_path_factory.mktemp("requests"))
        with server:
            return ask_all(server, probe, prompts, has_beams=name != "EAGLE-3")

    return run


with_a_policy = pytest.mark.parametrize("name", ["policy", "EAGLE-3"])


@with_a_policy
@pytest.mark.parametrize("size", [len(GRAMMARS), LARGE])
def test_constrained_answers_obey_their_grammar(size, name, visit):
    """At full budget they are those without a policy, as are several answers to one request."""
    answers = visit(name).constrained[size]
    assert len(answers) == size
    assert visit(name).several == visit("off").several
    assert len(visit(name).several) == 6
    if size == len(GRAMMARS):
        assert read_tokens(answers) == read_tokens(visit("off").constrained[size])
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
