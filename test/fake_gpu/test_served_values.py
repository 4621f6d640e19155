"""A server whose selections are computed, in graphs and outside: they are the reference's on the same logits, and what
it counts is what they are.
"""

import json
from time import sleep

import pytest
import torch

from fake_gpu.test_servers import check
from sglang_xshare import Batch, Router, build_plan, select

LAYERS, TOP_K = 2, 4
SMALL = ("qwen3-moe-small", "--cuda-graph-bs-decode", "1", "4", "--disable-prefill-cuda-graph")
SUMS = ("layer_steps", "experts_before", "experts_after", "rows", "exact_rows", "kept_mass")
PLANS = {"xshare": {"k0": 1, "add": 3}, "oea": {"k0": 2}}


@pytest.fixture
def serve_values(serve, tmp_path):
    """A function (policy, keys) that starts a server, and one that reads what it has selected since it was asked."""
    probe, seen = tmp_path / "probe", 0

    def start(policy, keys):
        flags = ("--expert-policy", policy, "--expert-policy-config", json.dumps(keys))
        return serve(*SMALL, *flags, FAKE_GPU_VALUES="ours", FAKE_GPU_PROBE=str(probe))

    def read():
        nonlocal seen
        records = [json.loads(line) for line in probe.read_text().splitlines()][seen:]
        seen += len(records)
        return records

    return start, read


def expect(record, policy, keys):
    """The reference's answer to a record's logits."""
    valid, exact = (record[name] and torch.tensor(record[name]) for name in ("valid", "exact"))
    batch = Batch(None if valid is None else valid, exact=exact)
    plan = build_plan(policy, **keys)
    return select(torch.tensor(record["logits"]), plan, Router(TOP_K), batch, backend="reference")


def check_records(records, policy, keys):
    """Every row has the reference's experts. Returns the sums that a server counts."""
    sums = dict.fromkeys(SUMS, 0)
    for record in records:
        wanted = expect(record, policy, keys)
        assert record["active"] == wanted.active.tolist()
        live = record["valid"] or [True] * len(record["logits"])
        for row in (row for row, is_live in enumerate(live) if is_live):
            pairs = zip(record["ids"][row], record["weights"][row], strict=True)
            found = {expert: weight for expert, weight in pairs if weight > 0}
            own = zip(wanted.topk_ids[row].tolist(), wanted.topk_weights[row].tolist(), strict=True)
            assert found == pytest.approx({expert: weight for expert, weight in own if expert >= 0}, rel=1e-4)
        sums["layer_steps"] += 1
        sums["experts_before"] += int(wanted.vanilla_active.sum())
        sums["experts_after"] += int(wanted.active.sum())
        sums["rows"] += sum(live)
        sums["exact_rows"] += sum(a and b for a, b in zip(live, record["exact"] or (), strict=False))
        sums["kept_mass"] += float(wanted.kept_mass.sum())
    return sums


def read_counts(server):
    """The same of the server's counters since its last switch."""
    found = server.get("/expert_policy")["since_switch"]
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

    assert server.post("/expert_policy", {"policy": "xshare", "k0": 1, "add": 1}).status_code == 200
    read()
    server.generate(3, 3)
    counts = read_counts(server)
    assert counts == pytest.approx(check_records(read(), "xshare", {"k0": 1, "add": 1}), rel=1e-5)
    check(server)


def test_what_is_observed_is_the_references(serve_values):
    start, read = serve_values
    spellings = {policy: f"{policy}:" + ",".join(f"{k}={v}" for k, v in keys.items()) for policy, keys in PLANS.items()}
    server = start("observe", {"plans": list(spellings.values())})
    server.generate(3, 3)
    server.get("/expert_policy")
    sleep(5)  # an idle server brings its metrics up to date
    records, metrics = read(), server.read_metrics("plan")
    for policy, spelling in spellings.items():
        sums = check_records([one for one in records if one["policy"] == policy], policy, PLANS[policy])
        assert sums["layer_steps"] >= 2 * LAYERS
        assert metrics[f"observed_experts_total {spelling}"] == sums["experts_after"]
        assert metrics[f"observed_mass_total {spelling}"] == pytest.approx(sums["kept_mass"], rel=1e-5)
    check(server)
