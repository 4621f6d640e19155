"""All that requests may ask of a server beyond a text, asked of one: see `test_requests.py`."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests

from benchmark.common.server import Server
from served.answers import NEW_TOKENS, read_all, read_lines

SMALL, LARGE = 8, 16
"""Requests at once: at most the former run at full budget."""
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


def ask_all(server: Server, probe: Path, prompts: Sequence[str], has_beams: bool) -> SimpleNamespace:
    """Return what a running server answers to everything, one after another, and what was counted meanwhile."""
    constrained = {size: ask_constrained(server, prompts[:size]) for size in (len(GRAMMARS), LARGE)}
    several = server.generate(prompts[:2], n=3, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    beams = {
        size: server.generate(prompts[:size], beam_width=BEAMS, n=BEAMS, max_new_tokens=NEW_TOKENS)
        for size in ((2, 4) if has_beams else ())
    }
    routed = {size: ask_routed(server, probe, prompts[:size]) for size in (SMALL, LARGE)}
    survivors, aborted = ask_and_abort(server, prompts[:SMALL])
    after = generate_tokens(server, prompts[:SMALL], LONG)
    records, metrics = read_all(server, probe)
    running = re.findall(r"^sglang:num_(?:running|queue)_reqs\{.*\} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return SimpleNamespace(
        constrained=constrained,  # by the number of requests; GRAMMARS in turn
        several=[answer["output_ids"] for answer in several],
        beams=beams,
        routed={size: answers for size, (answers, _) in routed.items()},
        steps={size: calls for size, (_, calls) in routed.items()},  # decode calls of the MoE runner meanwhile
        survivors=survivors,  # tokens of requests beside which others were aborted
        aborted=aborted,
        after=after,  # tokens to the aborted requests' prompts, sent again
        calls=lambda mode, least=1: [one for one in records if one["mode"] == mode and one["rows"] >= least],
        metrics=metrics,
        running=sum(map(float, running)),  # requests that the server believes to run or to wait, at the end
        log=server.log_text(),
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
