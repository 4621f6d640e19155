"""EAGLE-3 with a policy: verification selects per request, drafts and prefill are left alone."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from stage.release import LATEST
from stage.served import LAYERS, Answers, ask, policy

DRAFT_TOKENS = 4


def eagle(model: Path, topk: int = 1, steps: int = 3, draft_tokens: int = DRAFT_TOKENS) -> tuple[str, ...]:
    """The flags of EAGLE-3 with the checkpoint's draft, on CPU."""
    backends = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
    draft = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{model}-eagle3")
    shape = ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk))
    return (*backends, *draft, *shape, "--speculative-num-draft-tokens", str(draft_tokens))


@pytest.fixture(scope="session")
def speculated(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Answers]:
    """Call it with policy flags, and more for a tree, for the answers of a server that speculates."""

    @cache
    def run(flags: Sequence[str], *shape: int) -> Answers:
        scratch = tmp_path_factory.mktemp("speculated")
        return ask(tiny_model, patched_release(LATEST), (*eagle(tiny_model, *shape), *flags), scratch)

    return run


PER_REQUEST = policy("xshare", k0=1, add=0, add_per_request=4)
FULL = policy("xshare", k0=1, add=64)


def test_verify_selects_per_request(speculated):
    answers = speculated(PER_REQUEST)
    calls = answers.calls("TARGET_VERIFY")
    assert {call["rows"] % DRAFT_TOKENS for call in calls} == {0}
    assert max(call["rows"] for call in calls) == 16 * DRAFT_TOKENS
    # Every row keeps its first choice, and a request adds 4.
    assert all(call["after"] <= call["rows"] + 4 * call["rows"] // DRAFT_TOKENS for call in calls)
    alone = [call["after"] for call in calls if call["rows"] == DRAFT_TOKENS]
    assert max(alone) <= DRAFT_TOKENS + 4
    assert sum(call["after"] for call in calls) < sum(call["before"] for call in calls)


def test_verify_is_counted_as_the_runner_received_it(speculated):
    answers = speculated(PER_REQUEST)
    calls = answers.calls("TARGET_VERIFY")
    assert answers.metrics["steps policy"] == len(calls) / LAYERS > 0
    assert answers.metrics["steps prefill"] == answers.forwards("EXTEND")
    assert answers.metrics["experts_before_total"] == sum(call["before"] for call in calls)
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in calls)
    traced = [(record["phase"], record["batch_size"], record["experts_after"]) for record in answers.trace]
    assert traced == [("verify", call["rows"], call["after"]) for call in calls]


def test_only_the_target_model_selects(speculated):
    """Prefill is routed as without a policy; a forward of the draft is no step."""
    answers = speculated(PER_REQUEST)
    assert {call["mode"] for call in answers.records} == {"EXTEND", "TARGET_VERIFY"}
    assert all(call["after"] == call["before"] for call in answers.calls("EXTEND"))
    outcomes = {name: count for name, count in answers.metrics.items() if name.startswith("steps ") and count}
    assert outcomes.keys() == {"steps policy", "steps prefill"}


@pytest.mark.parametrize(
    "shape",
    [(), pytest.param((2, 3, 6), marks=pytest.mark.long), pytest.param((4, 3, 8), marks=pytest.mark.long)],
)
def test_full_budget_answers_as_no_speculation(shape, speculated, served):
    """Chains and trees: (top-k, steps, draft tokens)."""
    answers = speculated(FULL, *shape)
    assert answers.tokens == served("unpatched").tokens
    draft_tokens = shape[2] if shape else DRAFT_TOKENS
    assert max(call["rows"] for call in answers.calls("TARGET_VERIFY")) == 16 * draft_tokens
