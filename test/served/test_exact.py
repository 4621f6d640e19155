"""Exact requests beside cheap ones: each is answered as by a server without a policy, whatever runs beside it."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from threading import Event, Lock
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from benchmark.common.server import Server, ServerError
from served.answers import greedy, make_server, policy, read_metrics, read_prompts
from served.eagle import CHAIN, TREES, eagle
from served.load import post
from served.ranks import OLD_TWO, TWO, TWO_CORES, keys_of
from served.release import LATEST, OLDEST, make_env

CLIENTS, EXACT_SHARE, ABORTED = 16, 0.25, 0.05
WANTED, WANTED_ELSEWHERE = 512, 128
"""Exact answers: of one rank without drafts on the latest release, and of each other server of LOADED."""
XSHARE = {"policy": "xshare", "k0": 1, "add": 4}
PLANS: list[dict[str, Any]] = [
    XSHARE,
    {"policy": "oea", "k0": 1},
    {"policy": "vanilla"},
    {**XSHARE, "exact": {"default": True}},
    {"policy": "xshare", "k0": 1, "add": 0, "layers": {"1": {"policy": "vanilla"}}},
    {"policy": "observe", "plans": ["oea:k0=3"]},
    {"policy": "lynx-lat", "retain": 12},
]
TIGHT = ("--max-total-tokens", "2048")
"""So few that prefixes are evicted."""
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
"""SGLang's own switch: requests are retracted every so many steps."""
Load = tuple[tuple[str, ...], str, tuple[int, int, int] | None]
LOADED: tuple[Load, ...] = (
    ((), LATEST, None),
    ((), LATEST, TREES[0]),
    (("--tp", "2"), LATEST, CHAIN),
    (TWO, LATEST, None),
    (TWO, LATEST, CHAIN),
    ((), OLDEST, CHAIN),
    (OLD_TWO, OLDEST, None),
)
"""Servers under load: flags of ranks, release, shape of a draft."""
pytestmark = pytest.mark.long


@dataclass
class Heard:
    """What clients have asked and heard: (tokens of a prompt, of its answer) of exact requests, and texts to go on."""

    exact: list[tuple[list[int], list[int]]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    aborted: int = 0
    others: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    log: str = ""
    lock: Lock = field(default_factory=Lock)


def sample(count, said):
    return greedy(count, **({"custom_params": {"expert_policy": said}} if said else {}))


def keep_asking(server, prompts, client, heard, ended):
    """One request after another: a beginning, or what another one was answered, which the cache may still hold."""
    choose = random.Random(client)
    number = 0
    while not ended.is_set():
        number += 1
        rid, length = f"{client}-{number}", choose.randrange(4, 28)
        said = "exact" if choose.random() < EXACT_SHARE else choose.choice(["shared", None])
        with heard.lock:
            former = heard.said[-200:]
        ids = choose.choice(former) if former and choose.random() < 0.5 else choose.choice(prompts)
        ids = ids[: choose.randrange(2, 60)] if choose.random() < 0.5 else ids[:60]
        body = {"input_ids": ids, "rid": rid, "sampling_params": sample(length, said)}
        if choose.random() < ABORTED:
            body["sampling_params"]["max_new_tokens"] = 300
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(server.post, "/generate", body)
                time.sleep(0.1)
                server.post("/abort_request", {"rid": rid})
                try:
                    asked.result(120)
                except ServerError:
                    assert server.returncode() is None
            heard.aborted += 1
            continue
        answer = server.post("/generate", body)
        told = answer["meta_info"]["expert_policy"]
        assert len(answer["output_ids"]) == length
        with heard.lock:
            if told.get("exact"):
                assert told["steps"] == 0
                heard.exact.append((ids, answer["output_ids"]))
            else:
                assert said != "exact"
                heard.others += 1
            heard.said.append(ids + answer["output_ids"])


def ask_again(server, asked):
    """What a server answers to the same, 16 at a time."""
    found = []
    for first in range(0, len(asked), CLIENTS):
        some = asked[first : first + CLIENTS]
        each = [sample(len(answer), None) for _, answer in some]
        answers = server.post("/generate", {"input_ids": [ids for ids, _ in some], "sampling_params": each})
        found += [answer["output_ids"] for answer in answers]
    return found


@pytest.fixture(scope="module")
def load(tiny_model, patched_release, tmp_path_factory):
    """Call it with one of LOADED for what its clients have heard: requests come, go, are aborted and retracted, and the
    policy is switched; some go on where others, not exact, have left their keys.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(tiny_model)]

    @cache
    def run(loaded):
        ranks, release, draft = loaded
        flags = [*keys_of(XSHARE), *ranks, *(eagle(tiny_model, draft) if draft else ())]
        flags += [] if ranks else TIGHT
        env = TWO_CORES if ranks else RETRACTING
        server, _, _ = make_server(tiny_model, patched_release(release), flags, tmp_path_factory.mktemp("load"), env)
        heard, ended, switches = Heard(), Event(), 0
        with server:
            with ThreadPoolExecutor(CLIENTS) as clients:
                asking = [clients.submit(keep_asking, server, prompts, one, heard, ended) for one in range(CLIENTS)]
                try:
                    while len(heard.exact) < count_wanted(loaded) and not any(one.done() for one in asking):
                        plan = PLANS[switches // 2 % len(PLANS)] if switches % 2 else XSHARE
                        assert post(server, plan).status_code == 200
                        switches += 1
                        time.sleep(0.3)
                finally:
                    ended.set()
            for one in asking:
                one.result()
            heard.metrics, heard.log = read_metrics(server, 0), server.log_text()
        return heard

    return run


def count_wanted(loaded):
    return WANTED if loaded == LOADED[0] else WANTED_ELSEWHERE


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("loaded", LOADED, ids=str)
def test_exact_requests_are_served_under_load_and_switches(loaded, load):
    heard, wants, ranks = load(loaded), count_wanted(loaded), loaded[0]
    assert len(heard.exact) >= wants
    assert heard.others > wants
    assert heard.aborted > wants // 50
    assert ranks or heard.log.count("#retracted_reqs") > wants // 50
    assert 0 < heard.metrics["exact_rows_total"] < heard.metrics["rows_total"]
    assert "Scheduler hit an exception" not in heard.log


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", [LATEST, OLDEST])
def test_exact_answers_are_those_of_a_server_without_a_policy(release, load, tiny_model, patched_release):
    """One server answers everything again, 16 requests at a time."""
    heard = {loaded: load(loaded).exact for loaded in LOADED if loaded[1] == release}
    with Server(tiny_model, ["--dtype", "float32"], env=make_env(patched_release(release)), name="vanilla") as vanilla:
        wanted = {loaded: ask_again(vanilla, exact) for loaded, exact in heard.items()}
    wrong = {
        loaded: sum(answer != other for (_, answer), other in zip(heard[loaded], wanted[loaded], strict=True))
        for loaded in heard
    }
    assert wrong == dict.fromkeys(heard, 0)


def serve(model, tree, name, *flags, **keys):
    """A server under a policy, not started yet."""
    args = [*policy("xshare", k0=1, add=4, **keys), *flags]
    return Server(model, args, release=tree, name=name, deadline=600)


def test_priorities_and_the_live_default(tiny_model, prompts, patched_release):
    """Of at least a priority, or by default; a request's own word goes before both."""
    flags, exact = "--enable-priority-scheduling", {"priority": 10}

    def ask(server, said, priority):
        extra = {} if priority is None else {"priority": priority}
        body = {"text": prompts[0], "sampling_params": sample(4, said), **extra}
        return bool(server.post("/generate", body)["meta_info"]["expert_policy"].get("exact", False))

    with serve(tiny_model, patched_release(LATEST), "priority", flags, exact=exact) as server:
        asked = [(None, None), (None, 9), (None, 10), ("shared", 12), ("exact", 1)]
        assert [ask(server, *one) for one in asked] == [False, False, True, False, True]
        assert server.get("/expert_policy")["in_force"]["exact"] == {"priority": 10}
        assert post(server, {**XSHARE, "exact": {"default": True}}).json()["exact"] == {"default": True}
        assert [ask(server, *one) for one in asked] == [True, True, True, False, True]
        assert post(server, XSHARE).status_code == 200
        assert [ask(server, *one) for one in asked] == [False, False, False, False, True]


def test_a_server_that_ignores_clients_says_so_in_their_answers(tiny_model, prompts, patched_release):
    """They follow the policy, by whichever way they ask; the operator's own rule still makes requests exact."""
    flags, exact = ("--enable-priority-scheduling", "--expert-policy-ignore-client-exact"), {"priority": 10}

    def ask(server, said, **extra):
        body = {"text": prompts[0], "sampling_params": sample(4, said), **extra}
        told = server.post("/generate", body)["meta_info"]["expert_policy"]
        return told.get("exact"), told["steps"] > 0

    with serve(tiny_model, patched_release(LATEST), "ignored", *flags, min_rows=1, exact=exact) as server:
        assert ask(server, "exact") == ask(server, None, routing_key="a;expert_policy=exact") == (False, True)
        assert ask(server, None) == ask(server, "shared", priority=12) == (None, True)
        assert ask(server, None, priority=10) == ask(server, "exact", priority=12) == (True, False)
        body = {"model": "default", "prompt": prompts[0], "max_tokens": 4, "custom_params": {"expert_policy": "exact"}}
        assert server.post("/v1/completions", body)["sglext"]["expert_policy"]["exact"] is False
        body["custom_params"]["expert_policy"] = "exakt"
        assert requests.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 400


def test_a_streaming_session_is_exact_in_all_its_turns(tiny_model, patched_release):
    with serve(tiny_model, patched_release(LATEST), "session", "--enable-streaming-session") as server:

        def talk(session, said):
            body = {"text": "def f(", "session_params": {"id": session}, "sampling_params": sample(4, said)}
            return requests.post(server.url + "/generate", json=body, timeout=60)

        for turns, line in ((["exact", "exact"], None), ([None, "exact"], "all turns of a streaming session")):
            session = server.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
            *former, last = (talk(session, said) for said in turns)
            assert all(answer.status_code == 200 for answer in former)
            if line is None:
                assert last.json()["meta_info"]["expert_policy"]["exact"]
            else:
                assert last.status_code == 400
                assert line in last.text
