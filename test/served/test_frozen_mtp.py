"""FROZEN_KV_MTP: Gemma 4 with experts is verified by a policy; its assistant reads the target's keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from served import gemma, host
from served.answers import NEW_TOKENS, install_plugin, make_server, policy, read_all
from served.eagle import DRAFT_TOKENS, check_verified
from served.families import read_routers
from served.family import EXPERTS
from served.probe import read_logits
from served.release import LATEST
from sglang_xshare import Batch, Router, build_plan, select

FULL, BUDGET = 4, 16
"""Requests at once: whose experts no budget cuts, and those of a budget."""
PLAN: dict[str, Any] = {"k0": 1, "add": 8, "acceptance": 0.5, "warm_rows": 1}
WIDE: dict[str, Any] = {"k0": 1, "add": EXPERTS, "utility": "full"}
FLAGS = (
    *policy("xshare", **PLAN, by_rows={f"1-{FULL * DRAFT_TOKENS}": WIDE | {"acceptance": 1.0, "warm_rows": None}}),
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(DRAFT_TOKENS), *gemma.FLAGS),
)


@dataclass(frozen=True)
class Run:
    """What one server said and counted: under the policy, with every second request exact, and with the policy off."""

    pristine: list[list[int]]
    """The answers of SGLang as it is published, without speculation, to as many requests as the most."""
    full: list[dict[str, Any]]
    budget: list[dict[str, Any]]
    exact: list[dict[str, Any]]
    off: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    """Of the MoE runner until the policy was switched off."""
    metrics: dict[str, float]
    routers: dict[int, Router]


@pytest.fixture(scope="session")
def run(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    scratch = tmp_path_factory.mktemp("gemma")
    model = gemma.write_models(scratch)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, model.config.vocab_size, (BUDGET, 8), generator=generator).tolist()
    tokenizer = ("--tokenizer-path", str(tiny_model))
    plain, _, _ = make_server(
        scratch / "target", pristine_release(LATEST), (*gemma.PLAIN, *tokenizer), scratch / "plain"
    )
    with plain:
        pristine = read_tokens(plain.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    flags = (*FLAGS, "--speculative-draft-model-path", str(scratch / "draft"), *tokenizer)
    host.install(scratch)
    install_plugin(scratch, gemma.PLUGIN)
    server, probe, _ = make_server(scratch / "target", patched_release(LATEST), flags, scratch)
    with server:
        full, budget = (
            server.generate(prompts[:size], max_new_tokens=NEW_TOKENS, ignore_eos=True) for size in (FULL, BUDGET)
        )
        calls, metrics = read_all(server, probe)
        plainly = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        exactly = plainly | {"custom_params": {"expert_policy": "exact"}}
        exact = server.generate(prompts, {"sampling_params": [exactly, plainly] * (BUDGET // 2)})
        server.post("/expert_policy", {"policy": "vanilla"})
        off = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return Run(pristine, full, budget, exact, off, calls, metrics, read_routers(gemma.GEMMA, model))


def read_tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [one["output_ids"] for one in answers]


@pytest.mark.long
def test_what_no_budget_cuts_is_answered_as_by_the_pristine_release_without_drafts(run):
    assert read_tokens(run.full) == run.pristine[:FULL]
    assert read_tokens(run.off) == run.pristine
    assert read_tokens(run.exact)[::2] == run.pristine[::2]
    assert read_tokens(run.budget) != run.pristine


@pytest.mark.long
def test_verification_selects_as_the_reference_and_drafts_count_by_their_depth(run):
    depth = torch.arange(DRAFT_TOKENS, dtype=torch.int32)
    verified = [call for call in run.calls if call["mode"] == "TARGET_VERIFY"]

    def choose(call: dict[str, Any], acceptance: float = PLAN["acceptance"]) -> tuple[dict[str, Any], Any]:
        is_full = call["requests"] <= FULL
        return (WIDE, None) if is_full else (PLAN | {"acceptance": acceptance}, depth.repeat(call["requests"]))

    differing = 0
    for call, chosen in zip(verified, check_verified(verified, run.routers, choose), strict=True):
        keys, depths = choose(call, 1.0)
        batch, plan = Batch(tokens_per_request=DRAFT_TOKENS, depth=depths), build_plan("xshare", **keys)
        even = select(read_logits(call), plan, run.routers[call["layer"]], batch, backend="reference")
        differing += not torch.equal(chosen.active, even.active)
    assert differing > 0, "depth decides something"
    assert run.metrics["steps policy"] == len(verified) / len(run.routers) > 0
    assert run.metrics["experts_after_total"] == sum(call["after"] for call in verified)
    assert run.metrics["layer_steps_total"] == len(verified)


@pytest.mark.long
def test_answers_tell_their_policy(run):
    for one in run.budget:
        told = one["meta_info"]["expert_policy"]
        assert told["policy"].startswith("xshare, plan ")
        assert told["steps"] == told["of"] == one["meta_info"]["spec_verify_ct"] > 0
    told = [one["meta_info"]["expert_policy"] for one in run.exact]
    assert all(one["exact"] and one["steps"] == 0 for one in told[::2])
    assert all("exact" not in one and one["steps"] > 0 for one in told[1::2])
    assert {one["meta_info"]["expert_policy"]["steps"] for one in run.off} == {0}
