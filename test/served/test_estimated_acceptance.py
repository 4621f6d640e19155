"""EAGLE-3 with `acceptance: "auto"`: drafts count by what the server's own requests accept of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from served.answers import make_server, policy, read_lines, read_prompts
from served.eagle import DRAFT_TOKENS, eagle, select_again
from served.release import both_releases
from sglang_xshare.stage.acceptance import FIRST, estimate

PLAN: dict[str, Any] = {"policy": "xshare", "k0": 1, "add": 4, "acceptance": "auto"}
NEW_TOKENS, START = 48, 63 / 64
pytestmark = pytest.mark.long


@pytest.fixture
def server(tiny_model: Path, patched_release: Callable[[str], Path], tmp_path: Path, release: str):
    keys = {name: value for name, value in PLAN.items() if name != "policy"}
    flags = (*eagle(tiny_model), *policy("xshare", **keys))
    started, probe, _ = make_server(tiny_model, patched_release(release), flags, tmp_path)
    with started:
        yield started, probe


@both_releases
def test_drafts_count_by_what_was_accepted(server, tiny_model):
    served, probe = server
    told = served.get("/expert_policy")
    assert (told["acceptance"], told["estimated_acceptance"]) == ("auto", START)
    prompts, verified, drafts, checked = read_prompts(tiny_model), 0, 0, 0
    for turn in range(1, 5):
        seen, before = len(read_lines(probe)), told["estimated_acceptance"]
        answers = served.generate(prompts[turn::4], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        infos = [answer["meta_info"] for answer in answers]
        told = served.get("/expert_policy")
        verified += sum(info["spec_verify_ct"] for info in infos)
        drafts += sum(info["spec_num_correct_drafts"] for info in infos)
        calls = [call for call in read_lines(probe)[seen:] if call["mode"] == "TARGET_VERIFY"]
        for call in calls if told["estimated_acceptance"] == before else ():
            assert call["active"] == select_again(call, PLAN | {"acceptance": before}, DRAFT_TOKENS)
            checked += 1
    assert checked
    number = told["estimated_acceptance"]
    # What was counted since the last power of two of forwards waits for the next.
    assert number == pytest.approx(estimate((3 * FIRST + drafts) / (FIRST + verified), DRAFT_TOKENS), abs=0.06)
    assert number < START
