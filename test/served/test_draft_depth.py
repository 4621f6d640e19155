"""Drafts as deep as pay, served as docs/guide.md does it:

sglang serve --model-path DIR --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT --speculative-adaptive --expert-policy-draft-depth throughput
"""  # noqa: E501

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from served.answers import LAYERS, make_server, policy, read_lines, read_prompts
from served.eagle import eagle, select_again
from served.ranks import TWO_CORES
from served.release import LATEST

RELEASES = ("0.5.21", LATEST)
CANDIDATES = (1, 3)
WIDTHS = {1, 2, 4}
"""Tokens verified of a request: those of no draft too."""
NEW_TOKENS = 224
THROUGHPUT = ("--expert-policy-draft-depth", "throughput")
XSHARE = {"policy": "xshare", "k0": 1, "add": 6}
pytestmark = pytest.mark.long


@pytest.fixture
def adaptive(tiny_model: Path, tmp_path: Path) -> tuple[str, ...]:
    """The flags of drafts that adapt."""
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"1": {"candidate_steps": list(CANDIDATES)}}))
    return (*eagle(tiny_model), "--speculative-adaptive", "--speculative-adaptive-config", str(file))


@pytest.fixture(scope="module")
def serve(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    def make(flags: tuple[str, ...], release: str = LATEST, env: dict[str, str] | None = None) -> Any:
        return make_server(tiny_model, patched_release(release), flags, tmp_path_factory.mktemp("server"), env)

    return make


@pytest.fixture(scope="module")
def at_a_fixed_depth(tiny_model: Path, serve: Callable[..., Any]) -> Callable[[str], list[list[int]]]:
    """Call it with a release for the answers to four prompts at one depth."""

    @cache
    def run(release: str) -> list[list[int]]:
        server, _, _ = serve(eagle(tiny_model), release)
        with server:
            return generate(server, read_prompts(tiny_model)[:4])

    return run


def generate(server: Any, prompts: list[str]) -> list[list[int]]:
    return [answer["output_ids"] for answer in server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)]


def widths(probe: Path) -> set[float]:
    """The tokens of a request in the verify steps that were seen."""
    return {call["rows"] / call["requests"] for call in read_lines(probe) if call["mode"] == "TARGET_VERIFY"}


@pytest.mark.parametrize("release", RELEASES)
def test_greedy_answers_at_changing_depths_are_those_at_a_fixed_one(
    release, serve, adaptive, tiny_model, at_a_fixed_depth
):
    """In float32, token for token, without a policy, whose choice would follow the width."""
    prompts, expected = read_prompts(tiny_model)[:4], at_a_fixed_depth(release)
    server, probe, _ = serve((*adaptive, *THROUGHPUT), release)
    with server:
        assert generate(server, prompts) == expected
        assert generate(server, prompts[:1]) == expected[:1]
        metrics = server.get("/metrics")
    assert widths(probe) == WIDTHS
    assert re.search(r", draft depth [013]", server.log_text())
    assert "Switch adaptive runtime state" not in server.log_text()
    assert set(re.findall(r'expert_policy_draft_depth{batch_size="(\d+)"', metrics)) >= {"1", "4"}


def test_a_policy_selects_by_the_width_at_hand_and_a_switch_forgets_the_times(serve, adaptive, tiny_model):
    keys = {name: value for name, value in XSHARE.items() if name != "policy"}
    server, probe, _ = serve((*adaptive, *policy("xshare", **keys)))
    prompts = read_prompts(tiny_model)[:4]
    with server:
        generate(server, prompts)
        calls = [call for call in read_lines(probe) if call["mode"] == "TARGET_VERIFY"]
        told = server.get("/expert_policy")["draft_depth"]
        (size,) = (one for one in told["batch_sizes"] if one["batch_size"] == 4)
        assert size["depth"] in (0, *CANDIDATES)
        assert [one["depth"] for one in size["by_depth"]] == [0, *CANDIDATES]
        assert all(one["ms"] > 0 and 1 <= one["tokens"] <= one["depth"] + 1 for one in size["by_depth"])
        answer = server.post("/expert_policy", {**XSHARE, "add": 4})
        assert answer["in_force"]["add"] == 4
        generate(server, prompts[:1])
        after = server.get("/expert_policy")["draft_depth"]
        (other,) = (one for one in after["batch_sizes"] if one["batch_size"] == 4)
        assert (other["ms"], other["depth"]) == (None, size["depth"])
        seen = [call for call in read_lines(probe) if call["mode"] == "TARGET_VERIFY"][len(calls) :]
    assert {call["rows"] / call["requests"] for call in calls} == WIDTHS
    for plan, some in ((XSHARE, calls), (XSHARE | {"add": 4}, seen)):
        for call in some:
            if call["rows"] > 1:
                assert call["active"] == select_again(call, plan, call["rows"] // call["requests"])
    assert len(calls) % LAYERS == 0


def test_acceptance_auto_is_served(serve, adaptive, tiny_model):
    server, probe, _ = serve((*adaptive, *policy("xshare", k0=1, add=4, acceptance="auto")))
    with server:
        before = server.get("/expert_policy")["estimated_acceptance"]
        for _ in range(3):
            generate(server, read_prompts(tiny_model)[:4])
        told = server.get("/expert_policy")
    shares = told["draft_depth"]["accepted"]
    assert told["estimated_acceptance"] != before
    assert min(shares) - 0.2 <= told["estimated_acceptance"] <= max(shares) + 0.2
    assert widths(probe) == WIDTHS


def test_two_ranks_change_the_depth_together(serve, adaptive, tiny_model, at_a_fixed_depth):
    """Otherwise their tensors differ in shape, and a collective of theirs waits for ever or fails."""
    expected = at_a_fixed_depth(LATEST)
    server, probe, _ = serve((*adaptive, *THROUGHPUT, "--tp", "2"), env=TWO_CORES)
    with server:
        assert generate(server, read_prompts(tiny_model)[:4]) == expected
    steps = [
        [(call["rows"], call["requests"]) for call in read_lines(probe) if call["rank"] == rank and call["layer"] == 0]
        for rank in range(2)
    ]
    assert steps[0] == steps[1]
    assert widths(probe) == WIDTHS
