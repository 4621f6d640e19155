"""Drafts as deep as pay, served as docs/guide.md does it, and where upstream or nobody chooses the depth:

sglang serve --model-path DIR --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT --speculative-adaptive --expert-policy-draft-depth throughput
"""  # noqa: E501

import json
import re
from functools import cache

import pytest

from served.answers import LAYERS, make_server, read_all, read_lines, read_tokens
from served.eagle import eagle, select_again
from served.ranks import PER_REQUEST, TWO_CORES, keys_of
from served.release import LATEST

CANDIDATES = (1, 3)
WIDTHS = {1, 2, 4}
"""Tokens verified of a request: those of no draft too."""
THROUGHPUT = ("--expert-policy-draft-depth", "throughput")
XSHARE = {"policy": "xshare", "k0": 1, "add": 6}
pytestmark = pytest.mark.long


@pytest.fixture
def adapt(tiny_model, tmp_path):
    """A function (more keys of the steps) that returns the flags of drafts that adapt."""

    def adapt(**keys):
        file = tmp_path / "adaptive.json"
        file.write_text(json.dumps({"1": {"candidate_steps": list(CANDIDATES), **keys}}))
        return (*eagle(tiny_model), "--speculative-adaptive", "--speculative-adaptive-config", str(file))

    return adapt


@pytest.fixture(scope="module")
def at_a_fixed_depth(tiny_model, prompts, patched_release, tmp_path_factory):
    """Call it with a release for the answers to four prompts at one depth."""

    @cache
    def run(release):
        scratch = tmp_path_factory.mktemp("server")
        server, _, _ = make_server(tiny_model, patched_release(release), eagle(tiny_model), scratch)
        with server:
            return generate(server, prompts[:4])

    return run


def generate(server, prompts):
    return read_tokens(server.generate(prompts, max_new_tokens=224, ignore_eos=True))


def read_verified(probe):
    return [call for call in read_lines(probe) if call["mode"] == "TARGET_VERIFY"]


def widths(calls):
    """The tokens of a request in verify steps."""
    return {call["rows"] / call["requests"] for call in calls}


def check_selected(calls, plan):
    """Every verification has selected by its own width; a single row is vanilla."""
    for call in calls:
        if call["rows"] > 1:
            assert call["active"] == select_again(call, plan, call["rows"] // call["requests"])


@pytest.mark.parametrize("release", ["0.5.21", LATEST])
def test_greedy_answers_at_changing_depths_are_those_at_a_fixed_one(
    release, small_server, adapt, prompts, at_a_fixed_depth
):
    """In float32, token for token, without a policy, whose choice would follow the width."""
    expected = at_a_fixed_depth(release)
    server, probe, _ = small_server(*adapt(), *THROUGHPUT, release=release)
    with server:
        assert generate(server, prompts[:4]) == expected
        assert generate(server, prompts[:1]) == expected[:1]
        metrics = server.get("/metrics")
    assert widths(read_verified(probe)) == WIDTHS
    assert re.search(r", draft depth [013]", server.log_text())
    assert "Switch adaptive runtime state" not in server.log_text()
    assert set(re.findall(r'expert_policy_draft_depth{batch_size="(\d+)"', metrics)) >= {"1", "4"}


def test_a_policy_selects_by_the_width_at_hand_and_a_switch_forgets_the_times(small_server, adapt, prompts):
    server, probe, _ = small_server(*adapt(), *keys_of(XSHARE))

    def read_size():
        told = server.get("/expert_policy")["draft_depth"]["batch_sizes"]
        return next(one for one in told if one["batch_size"] == 4)

    with server:
        generate(server, prompts[:4])
        calls, size = read_verified(probe), read_size()
        assert size["depth"] in (0, *CANDIDATES)
        assert [one["depth"] for one in size["by_depth"]] == [0, *CANDIDATES]
        assert all(one["ms"] > 0 and 1 <= one["tokens"] <= one["depth"] + 1 for one in size["by_depth"])
        assert server.post("/expert_policy", {**XSHARE, "add": 4})["in_force"]["add"] == 4
        generate(server, prompts[:1])
        assert (read_size()["ms"], read_size()["depth"]) == (None, size["depth"])
    assert widths(calls) == WIDTHS
    check_selected(calls, XSHARE)
    check_selected(read_verified(probe)[len(calls) :], XSHARE | {"add": 4})
    assert len(calls) % LAYERS == 0


def test_upstreams_own_depths_are_followed(small_server, adapt, prompts):
    """Hysteresis chosen so that the server goes to and fro between one draft token and three."""
    steps = adapt(down_hysteresis=2.0, warmup_batches=1, update_interval=1)
    server, probe, _ = small_server(*steps, *keys_of(PER_REQUEST), "--expert-policy-draft-depth", "upstream")
    with server:
        for size in (16, 16, 1):
            server.generate(prompts[:size], max_new_tokens=20, ignore_eos=True)
        records, metrics = read_all(server, probe)
    calls = [call for call in records if call["mode"] == "TARGET_VERIFY"]
    assert widths(calls) == {2, 4}
    check_selected(calls, PER_REQUEST)
    assert metrics["steps policy"] == len(calls) / LAYERS
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)


def test_acceptance_auto_is_served(small_server, adapt, prompts):
    server, probe, _ = small_server(*adapt(), *keys_of(XSHARE | {"acceptance": "auto"}))
    with server:
        before = server.get("/expert_policy")["estimated_acceptance"]
        for _ in range(3):
            generate(server, prompts[:4])
        told = server.get("/expert_policy")
    shares = told["draft_depth"]["accepted"]
    assert told["estimated_acceptance"] != before
    assert min(shares) - 0.2 <= told["estimated_acceptance"] <= max(shares) + 0.2
    assert widths(read_verified(probe)) == WIDTHS


def test_two_ranks_change_the_depth_together(small_server, adapt, prompts, at_a_fixed_depth):
    """Otherwise their tensors differ in shape, and a collective of theirs waits for ever or fails."""
    expected = at_a_fixed_depth(LATEST)
    server, probe, _ = small_server(*adapt(), *THROUGHPUT, "--tp", "2", env=TWO_CORES)
    with server:
        assert generate(server, prompts[:4]) == expected
    calls = [call for call in read_lines(probe) if call["layer"] == 0]
    steps = [[(call["rows"], call["requests"]) for call in calls if call["rank"] == rank] for rank in range(2)]
    assert steps[0] == steps[1]
    assert widths(read_verified(probe)) == WIDTHS
