"""What a response says of the policy: which one acted on its request, and in how many of its steps."""

import json

import pytest
import requests

from benchmark.common.server import Server
from served.answers import NEW_TOKENS, greedy, policy
from served.load import post
from served.release import LATEST, OLDEST_LONG, make_env
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client

SPELT = "xshare:k0=1,add=8"
FLAGS = (*policy("xshare", k0=1, add=8), "--dtype", "float32")
UNTIL = 5
"""Tokens of a stream before something is done to it."""
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES = {"/v1/completions": {"prompt": "def f("}, "/v1/chat/completions": MESSAGES, "/v1/messages": MESSAGES}


@pytest.fixture(scope="module")
def serve(tiny_model, patched_release):
    """Call it with a release and flags for a server that is not started yet."""
    return lambda release, *flags: Server(tiny_model, flags, env=make_env(patched_release(release)), name="metadata")


@pytest.fixture(scope="module", params=[LATEST, OLDEST_LONG])
def server(request, serve):
    """A running server under a policy; it starts once a release, for all tests that request it."""
    with serve(request.param, *FLAGS) as running:
        yield running


def generate(server, prompts, *counts, **sampling):
    """The `meta_info` of greedy answers of so many tokens each."""
    each = {"sampling_params": [greedy(count, **sampling) for count in counts]}
    return [answer["meta_info"] for answer in server.generate(prompts, each)]


def test_each_answer_tells_the_steps_in_which_it_was_acted_on(server, prompts):
    """A request alone is below min_rows: its answer is the model's own."""
    (told,) = generate(server, prompts[:1], NEW_TOKENS)
    assert told["expert_policy"] == {"policy": SPELT, "steps": 0, "of": NEW_TOKENS - 1}
    short, long = (told["expert_policy"] for told in generate(server, prompts[:2], 12, 30))
    assert (short["of"], long["of"]) == (11, 29)
    assert 0 < short["steps"] <= 11
    # Overlap scheduling has launched one step more, with the row of the request that turns out to have ended.
    assert long["steps"] - short["steps"] in (0, 1)
    first, second = (told["expert_policy"] for told in generate(server, prompts[:1], NEW_TOKENS, n=2))
    assert first == second
    assert first["of"] == NEW_TOKENS - 1
    assert first["steps"] > 0


def count_exact_rows(server):
    return int(Client(server.url).get_policy()["counters"]["exact_rows"])


@pytest.mark.parametrize("route", ROUTES)
def test_v1_tells_it_in_sglext_and_a_header_asks_for_an_exact_answer(route, server):
    """OpenAI's `metadata` maps strings to strings, and strict clients refuse an object there. What 0.5.23 itself lists
    there, `weight_versions`, upstream means to move as well (pull request 40347). SGLang's router passes
    `X-SMG-Routing-Key` on where it drops fields, and no body of these routes is read.
    """
    exact_rows = count_exact_rows(server)
    body = {"model": "default", "max_tokens": 8, "ignore_eos": True} | ROUTES[route]
    answer = server.post(route, body)
    if route != "/v1/messages":
        assert answer["sglext"]["expert_policy"] == {"policy": SPELT, "steps": 0, "of": 7}
        assert answer["metadata"].keys() <= {"weight_version", "weight_versions"}
    neighbour = {"text": "a", "sampling_params": greedy(400), "stream": True}
    headers = {"X-SMG-Routing-Key": "user-7;expert_policy=exact"}
    with requests.post(server.url + "/generate", json=neighbour, stream=True, timeout=60) as running:
        lines = running.iter_lines()  # an iterator without a name would close the connection
        next(lines)  # alone a request is below min_rows
        answer = requests.post(server.url + route, json=body, headers=headers, timeout=60)
    assert answer.ok, answer.text
    assert count_exact_rows(server) > exact_rows
    if route != "/v1/messages":
        assert answer.json()["sglext"]["expert_policy"]["exact"] is True


def check_streams(server, prompt):
    """The last message of a stream tells, also where it is aborted, and where the policy is switched meanwhile."""

    def stream(count, *posted):
        """Return the metadata of one greedy answer's messages. After some messages, post (path, body)."""
        body = {"text": prompt, "rid": f"of {count}", "stream": True, "sampling_params": greedy(count)}
        messages = []
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    messages.append(json.loads(line[6:])["meta_info"])
                    if posted and messages[-1]["completion_tokens"] >= UNTIL:
                        server.post(*posted)
                        posted = ()
        return messages

    *others, last = stream(40)
    assert len(others) > UNTIL
    assert all("expert_policy" not in message for message in others)
    assert last["expert_policy"] == {"policy": SPELT, "steps": 0, "of": 39}

    last = stream(2000, "/abort_request", {"rid": "of 2000"})[-1]
    assert last["finish_reason"]["type"] == "abort"
    assert UNTIL - 1 <= last["expert_policy"]["of"] < 1999

    given = server.get("/expert_policy")
    last = stream(200, "/expert_policy", {"policy": "vanilla"})[-1]
    server.post("/expert_policy", given)
    assert last["finish_reason"]["type"] == "length"
    assert last["expert_policy"] == {"policy": f"{SPELT} > vanilla", "steps": 0, "of": 199}


def test_of_a_stream_the_last_message_tells(server, prompts):
    check_streams(server, prompts[0])


@pytest.mark.long
def test_of_a_stream_of_new_tokens_the_last_message_tells(serve, prompts):
    with serve(LATEST, *FLAGS, "--incremental-streaming-output") as server:
        check_streams(server, prompts[0])


@pytest.mark.long
def test_without_a_policy_nothing_is_told_and_a_switch_names_the_flag(serve, prompts):
    with serve(LATEST, "--dtype", "float32") as server:
        for told in generate(server, prompts[:2], 8, 8):
            assert "expert_policy" not in told
        assert "sglext" not in server.post("/v1/completions", {"prompt": "def", "max_tokens": 4})
        for answer in (requests.get(server.url + PATH, timeout=60), post(server, {"policy": "oea", "k0": 2})):
            assert answer.status_code == 400
            assert "started without an expert policy" in answer.json()["error"]
