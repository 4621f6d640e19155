"""A server whose selections are computed: they are the reference's on its logits, and what it counts is them."""

import json
from collections import Counter
from time import sleep

import pytest

from fake_gpu.checks import SINCE_0_5_23, SUMS, check, check_records
from fake_gpu.models import write_model
from fake_gpu.server import FEW_GRAPHS
from sglang_xshare.live.client import Client

LAYERS = 2
SMALL = ("qwen3-moe-small", *FEW_GRAPHS)
PLANS = {"xshare": {"k0": 1, "add": 3}, "oea": {"k0": 2}}


@pytest.fixture
def serve_values(serve, tmp_path):
    """A function (policy, keys) that starts a server, and one that reads what it has selected since it was asked."""
    probe, seen = tmp_path / "probe", 0

    def start(policy, keys, *more):
        flags = ("--expert-policy", policy, "--expert-policy-config", json.dumps(keys), *more)
        return serve(*SMALL, *flags, FAKE_GPU_VALUES="ours", FAKE_GPU_PROBE=str(probe))

    def read():
        nonlocal seen
        records = [json.loads(line) for line in probe.read_text().splitlines()][seen:]
        seen += len(records)
        return records

    return start, read


def read_counts(server):
    """The same of the server's counters since its last switch."""
    found = Client(server.url).get_policy()["since_switch"]
    return {name: found[name] for name in SUMS}


def test_counts_are_the_references(serve_values):
    start, read = serve_values
    server = start("xshare", PLANS["xshare"])
    for requests, exact in ((3, ()), (4, (1,)), (4, (0, 2)), (3, ()), (5, (4,))):
        metas = server.generate(requests, 3, exact)
        assert [meta["expert_policy"].get("exact", False) for meta in metas] == [n in exact for n in range(requests)]
    counts, records = read_counts(server), read()
    sums = check_records(records, "xshare", PLANS["xshare"])
    assert counts == pytest.approx(sums, rel=1e-5)
    # Overlap scheduling launches a step for requests that have just ended.
    assert sums["layer_steps"] >= 5 * 2 * LAYERS
    assert sums["exact_rows"] >= 4 * 2 * LAYERS
    assert {len(record["logits"]) for record in records} == {4, 5}

    server.switch({"policy": "xshare", "k0": 1, "add": 1})
    read()
    server.generate(3, 3)
    counts = read_counts(server)
    assert counts == pytest.approx(check_records(read(), "xshare", {"k0": 1, "add": 1}), rel=1e-5)
    check(server)


def test_what_is_observed_is_the_references(serve_values):
    start, read = serve_values
    spellings = {policy: f"{policy}:" + ",".join(f"{k}={v}" for k, v in keys.items()) for policy, keys in PLANS.items()}
    server = start("observe", {"plans": list(spellings.values())})
    # The same again must leave the tensors that the graphs add to.
    server.switch({"policy": "observe", "plans": list(spellings.values())})
    server.generate(3, 3)
    Client(server.url).get_policy()  # which waits for the device
    sleep(5)  # an idle server brings its metrics up to date
    records, metrics = read(), server.read_metrics("plan")
    for policy, spelling in spellings.items():
        sums = check_records([one for one in records if one["policy"] == policy], policy, PLANS[policy])
        assert sums["layer_steps"] >= 2 * LAYERS
        assert metrics[f"observed_experts_total {spelling}"] == sums["experts_after"]
        assert metrics[f"observed_mass_total {spelling}"] == pytest.approx(sums["kept_mass"], rel=1e-5)
    check(server)


@SINCE_0_5_23
def test_blocks_of_drafts_are_selected_for_as_by_the_reference(serve_values, tmp_path):
    """DFLASH: requests of four rows that count by their depth, in graphs, with padding and exact requests."""
    start, read = serve_values
    keys = {"k0": 1, "add": 3, "acceptance": 0.5, "warm_rows": 1}
    draft = write_model("qwen3-moe-small-dflash", tmp_path)
    server = start("xshare", keys, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))
    for requests, exact in ((3, ()), (4, (1,)), (5, (0, 4))):
        metas = server.generate(requests, 3, exact)
        assert [meta["expert_policy"].get("exact", False) for meta in metas] == [n in exact for n in range(requests)]
    counts, records = read_counts(server), read()
    sums = check_records(records, "xshare", keys)
    assert counts == pytest.approx(sums, rel=1e-5)
    assert sums["exact_rows"] >= (1 + 2) * 2 * 4 * LAYERS
    assert {(len(record["logits"]), record["tokens_per_request"]) for record in records} == {(16, 4), (20, 4)}
    for record in records:
        live = [depth for depth, is_live in zip(record["depth"], record["valid"], strict=True) if is_live]
        assert live == [0, 1, 2, 3] * (len(live) // 4)
    assert {sum(record["valid"]) for record in records} >= {12, 16, 20}
    check(server)


@SINCE_0_5_23
def test_graphs_weigh_drafts_by_the_estimate(serve_values, tmp_path):
    """No draft is accepted here, so that the chance of one falls: the graphs select by it, and nothing waits for it."""
    start, read = serve_values
    keys = {"k0": 1, "add": 3, "acceptance": "auto"}
    draft = write_model("qwen3-moe-small-dflash", tmp_path)
    server = start("xshare", keys, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))
    number, checked = server.get("/expert_policy")["estimated_acceptance"], {}
    for _ in range(12):
        former = number
        server.generate(4, 3)
        number, records = server.get("/expert_policy")["estimated_acceptance"], read()
        if number == former:  # else the steps between have had both
            checked[number] = check_records(records, "xshare", keys | {"acceptance": number})["layer_steps"]
    assert number < 0.8
    assert len(checked) >= 2
    assert all(checked.values())
    check(server)


POLICIES = [
    {"policy": "observe", "plans": ["xshare:k0=1,add=3", "oea:k0=2"]},
    {"policy": "xshare", "k0": 1, "add": 3},
    {"policy": "xshare", "k0": 1, "mass": 0.6},
    {"policy": "oea", "k0": 2},
    {"policy": "lynx-lat", "retain": 6},
    {"policy": "moe-spec", "budget": 6, "phases": ["decode"]},
    {"policy": "vanilla"},
]


def test_every_policy_may_follow_every_other(serve_values):
    """By new numbers in the same graphs, by graphs that are captured anew, or, to vanilla, by steps without a graph."""
    start, read = serve_values
    server = start("observe", {"plans": POLICIES[0]["plans"]})
    server.generate(3, 3)
    # Each ordered pair once: 0 1 0 2 ... 0 n 1 2 1 3 ... and back to the first.
    pairs = [(first, second) for first in range(len(POLICIES)) for second in range(first + 1, len(POLICIES))]
    recaptured = Counter()
    for policy in [*(POLICIES[one] for pair in pairs for one in pair), POLICIES[0]][1:]:
        recaptured[policy["policy"]] += server.switch(policy)["recaptured"]
        read()
        server.generate(3, 3)
        keys = {name: value for name, value in policy.items() if name not in ("policy", "phases", "plans")}
        counts, records = read_counts(server), read()
        if policy["policy"] == "vanilla":  # graphs that select go on, and leave every row its own experts
            check_records(records, "vanilla", {})
        elif policy["policy"] == "observe":
            assert {record["policy"] for record in records} == {"xshare", "oea"}
            for name, own in PLANS.items():
                check_records([record for record in records if record["policy"] == name], name, own)
        else:
            assert counts == pytest.approx(check_records(records, policy["policy"], keys), rel=1e-5)
            assert counts["layer_steps"] >= 2 * LAYERS
    assert recaptured["vanilla"] == 0
    assert recaptured["observe"] > 0
    assert recaptured["lynx-lat"] > 0
    check(server)
