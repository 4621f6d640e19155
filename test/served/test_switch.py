"""A running server's policy switches between two steps: under load, on all ranks and replicas, at no request's cost."""

import random
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import requests
import torch
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from transformers import AutoTokenizer

from benchmark.common.variant import parse_plan
from benchmark.quality.measure import Bench
from benchmark.quality.model import Layout, load_model
from benchmark.quality.served import SERVER_ARGS, measure_nats
from benchmark.quality.text import load_sequences
from served.answers import greedy, policy, read_lines, read_metrics, read_plans, read_tokens, say_together
from served.eagle import CHAIN, eagle
from served.load import CLIENTS, load, post, resident_mib
from served.ranks import OLD_TWO, PER_REQUEST, TWO, TWO_CORES, XSHARE, keys_of
from served.release import LATEST, OLDEST
from served.steps import check_steps
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client

SWITCHES, WARM_UP = 200, 60
ELSEWHERE = 100
"""Switches of a server other than of one rank, without drafts, on the latest release."""
PLANS: list[dict[str, Any]] = [
    XSHARE,
    {"policy": "oea", "k0": 2},
    {"policy": "vanilla"},
    {"policy": "xshare", "k0": 1, "add": 0, "layers": {"1": {"policy": "vanilla"}}, "by_rows": {"2-5": {"add": 3}}},
    {"policy": "observe", "plans": ["oea:k0=3", "xshare:k0=1,add=4"]},
    {"policy": "lynx-lat", "retain": 12},
]
VERIFIED_PLANS: list[dict[str, Any]] = [PER_REQUEST, {"policy": "moe-spec", "budget": 12}, *PLANS[1:5]]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "xshare", "k0": 9}, "k0 = 9:"),
    ({"policy": "xshare", "kO": 1}, "kO = 1: xshare has no such key"),
    ({"policy": "oea", "layers": {"4": {"k0": 1}}}, "layers 4: must be one of the model's layers, 0 to 3"),
]
PROMPT, STEPS, BATCH = 32, 32, 16


@pytest.fixture
def server(servers):
    """One server for the tests that request it."""
    return servers("--dtype", "float32", *policy("xshare", k0=1, add=4), *SERVER_ARGS)


def test_a_switched_server_costs_what_the_plan_costs_offline(server, tiny_model, capsys):
    """Teacher-forced, against a replay in transformers."""
    texts = load_sequences(tiny_model / "heldout", tiny_model, PROMPT + STEPS + 1, per_domain=BATCH // 4)
    mixed = texts.mix()
    bench = Bench(load_model(tiny_model), mixed, PROMPT)
    before = server.get(PATH)
    switched = before["switches"]
    assert (before["k0"], before["add"], before["in_force"]["utility"]) == (1, 4, "topk")
    for number, spelling in enumerate(("oea:k0=2", "vanilla"), 1):
        assert main(["policy", "set", server.url, spelling]) == 0
        assert spelling.partition(":")[0] in capsys.readouterr().out
        here = bench.run(parse_plan(spelling), Layout(BATCH)).nats
        torch.testing.assert_close(measure_nats(server, mixed.tokens, PROMPT, BATCH), here, rtol=0, atol=1e-3)
        told = server.get(PATH)
        assert told["switches"] == switched + number
        counted = {name for name, count in told["since_switch"]["outcomes"].items() if count}
        assert counted == ({"policy", "prefill"} if number == 1 else {"vanilla", "prefill"})
        assert all(
            state["expert_policy_config"] == told["in_force"] for state in server.get("/server_info")["internal_states"]
        )
        assert read_plans(server.get("/metrics")) == [told["plan_hash"]]
    for body, line in BAD:
        refused = post(server, body)
        assert refused.status_code == 400
        assert line in refused.json()["error"]
        assert "\n" not in refused.json()["error"]
    assert server.get(PATH)["in_force"] == {"policy": "vanilla"}
    assert post(server, before).json()["in_force"] == before["in_force"]


def test_exact_answers_are_vanillas_whatever_runs_beside_them(server, tiny_model, prompts):
    """On the server above: a quarter exact, at once with others; then where the others have left keys and values."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer(text)["input_ids"] for text in prompts]
    before = server.get(PATH)

    def ask(prompts, said, **more):
        each = [greedy(24, custom_params={"expert_policy": one}) for one in said]
        return server.post("/generate", {"input_ids": prompts, "sampling_params": each, **more})

    said = ["exact" if number % 4 == 0 else random.Random(number).choice(["shared", None]) for number in range(BATCH)]
    exact = [number for number, one in enumerate(said) if one == "exact"]
    answers = ask(prompts, said)
    found = read_tokens(answers)
    told = [answer["meta_info"]["expert_policy"] for answer in answers]
    assert [one.get("exact", False) for one in told] == [one == "exact" for one in said]
    assert all(one["steps"] == (0 if number in exact else one["of"]) for number, one in enumerate(told))
    since = Client(server.url).get_policy()["since_switch"]
    assert 0 < since["exact_rows"] < since["rows"]
    assert since["others_kept_mass"] < since["mean_kept_mass"]
    # What the others were answered is cached now, computed under the policy.
    longer = [prompt + answer for prompt, answer in zip(prompts, found, strict=True)]
    continued = ask(longer, ["exact"] * BATCH)
    cached = [number for number, answer in enumerate(continued) if answer["meta_info"]["cached_tokens"]]
    assert cached == exact
    assert max(answer["meta_info"]["cached_tokens"] for answer in ask(longer, ["shared"] * BATCH)) > 24
    assert post(server, {"policy": "vanilla"}).status_code == 200
    server.post("/flush_cache", {})
    wanted = read_tokens(ask(prompts, [None] * BATCH))
    assert [found[number] for number in exact] == [wanted[number] for number in exact]
    assert found != wanted
    assert read_tokens(continued) == read_tokens(ask(longer, [None] * BATCH))
    # A logit processor gets its parameters as ever.
    (first,) = ask(
        prompts[:1],
        ["exact"],
        custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
        sampling_params={"max_new_tokens": 1, "custom_params": {"expert_policy": "exact", "token_ids": wanted[0][:1]}},
    )
    assert first["output_ids"] != wanted[0][:1]
    line, key = "must be 'exact' or 'shared' (got 'exakt')", "user-7;expert_policy=exakt"
    wrong, header = {"custom_params": {"expert_policy": "exakt"}}, {"X-SMG-Routing-Key": key}
    message = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    for route, body, headers in (
        ("/generate", {"text": "a", "sampling_params": wrong}, {}),
        ("/generate", {"text": "a", "routing_key": key}, {}),
        ("/v1/completions", {"model": "m", "prompt": "a", **wrong}, {}),
        ("/v1/completions", {"model": "m", "prompt": "a"}, header),
        ("/v1/chat/completions", {**message, **wrong}, {}),
        ("/v1/chat/completions", message, header),
        ("/v1/messages", message, header),
    ):
        refused = requests.post(server.url + route, json=body, headers=headers, timeout=60)
        assert (refused.status_code, line in refused.text) == (400, True), (route, refused.text)
    post(server, before)


def switch(server, plans, count):
    """Switch so often, in turn, with a wrong POST after every tenth. Returns what the server answered."""
    answers = []
    for number in range(count):
        answer = post(server, plans[number % len(plans)])
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        if number % 10 == 9:
            body, line = BAD[number // 10 % len(BAD)]
            refused = post(server, body)
            assert (refused.status_code, line in refused.json()["error"]) == (400, True)
            now = server.get(PATH)
            assert (now["in_force"], now["switches"]) == (answers[-1]["in_force"], answers[-1]["switches"])
        time.sleep(0.05)
    return answers


def check_counters(answers):
    """What was counted between two switches are steps of the plan between them, and nothing is counted twice."""
    allowed = {"vanilla": {"vanilla", "prefill"}, "observe": {"observed", "prefill"}}
    for former, latter in pairwise(answers):
        outcomes = {
            name: count - former["counters"]["outcomes"][name] for name, count in latter["counters"]["outcomes"].items()
        }
        counted = {name for name, count in outcomes.items() if count}
        assert min(outcomes.values()) >= 0
        assert counted <= allowed.get(former["policy"], {"policy", "prefill", "min_rows", "unchanged"})
        assert latter["since_switch"]["layer_steps"] == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "release", "speculative"),
    [
        ((), LATEST, False),
        ((), LATEST, True),
        (("--tp", "2"), LATEST, True),
        (("--dp-size", "2"), LATEST, False),
        (TWO, LATEST, False),
        (TWO, LATEST, True),
        ((), OLDEST, True),
        (OLD_TWO, OLDEST, False),
    ],
    ids=lambda value: " ".join(value) or "one rank" if isinstance(value, tuple) else str(value),
)
def test_two_hundred_switches_under_load(ranks, release, speculative, tiny_model, small_server, prompts, served):
    alone = (ranks, release, speculative) == ((), LATEST, False)
    switches = SWITCHES if alone else ELSEWHERE
    plans = VERIFIED_PLANS if speculative else PLANS
    flags = (*keys_of(plans[0]), *ranks, *(eagle(tiny_model, CHAIN) if speculative else ()))
    server, probe, trace = small_server(*flags, release=release, env=TWO_CORES if ranks else {})
    with server:
        switch(server, plans, 2 * len(plans))  # while idle
        with load(server, prompts) as answered:
            answers = switch(server, plans, WARM_UP)
            warm = resident_mib(server)
            answers += switch(server, plans, switches - WARM_UP)
        assert sum(answered) > CLIENTS
        assert resident_mib(server) < 1.05 * warm
        check_counters(answers)
        told = Client(server.url).get_policy()
        assert told["switches"] == switches + 2 * len(plans)
        calls = read_lines(probe)
        schedulers = defaultdict(list)
        for call in calls:
            schedulers[call["pid"] if "--dp-size" in ranks else 0].append(call)
        assert len(schedulers) == (2 if "--dp-size" in ranks else 1)
        assert sum(check_steps(steps, plans, speculative) for steps in schedulers.values()) > switches / 10
        metrics = read_metrics(server, sum(told["counters"]["outcomes"].values()))
        assert metrics["layer_steps_total"] == Client(server.url).get_policy()["counters"]["layer_steps"]
        assert "Scheduler hit an exception" not in server.log_text()
        if "--dp-size" not in ranks:
            numbers = [record.get("switch", 0) for record in read_lines(trace)]
            assert numbers == sorted(numbers)
            assert len(set(numbers)) > switches / 4
        if alone:
            assert post(server, XSHARE).status_code == 200
            assert say_together(server, probe, prompts) == served("xshare").tokens[0]
