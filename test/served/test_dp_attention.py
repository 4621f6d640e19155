"""Data-parallel attention: every rank serves requests of its own, and the MoE layers see the rows of all."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.common.server import Server
from served.answers import LAYERS, make_server, policy, read_lines, read_metrics, read_prompts
from served.eagle import CHAIN, DRAFT_TOKENS, TOP_K, eagle
from served.probe import read_logits
from served.release import LATEST, OLDER
from sglang_xshare import Batch, Router, Selection, build_plan, select

# Ranks that decide differently wait for each other forever: that must fail a test, not the whole run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TWO, OLD_TWO = ("--tp", "2", "--attn-dp-size", "2"), ("--tp", "2", "--dp", "2", "--enable-dp-attention")
FOUR = ("--tp", "4", "--attn-dp-size", "4")
TWO_OF_TWO = ("--tp", "4", "--attn-dp-size", "2")
XSHARE = {"policy": "xshare", "k0": 1, "add": 8}
PER_REQUEST = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}
PER_RANK = {"policy": "xshare", "k0": 1, "target_per_rank": 5}
RANK_OF_EXPERT = [expert // 16 for expert in range(64)]
REQUESTS = (
    *((number, 0.0, 6 + 7 * number) for number in range(3)),  # one rank has two of them, and one is left alone
    *((number, 1.5 + 0.15 * number, 4 + number % 4 * 6) for number in range(3, 13)),  # they come while others decode
)
"""What a server is asked, after one request by itself: a prompt, at which second, and for how many tokens."""


@dataclass(frozen=True)
class Answers:
    """What a server said and did; `steps` has one entry a step and layer: the call of every rank, in step."""

    tokens: list[list[int]]
    steps: list[tuple[dict[str, Any], ...]]
    metrics: dict[str, float]
    trace: list[dict[str, Any]]

    @property
    def selecting(self) -> list[tuple[dict[str, Any], ...]]:
        """Decode and verify steps in which no rank prefilled."""
        return [calls for calls in self.steps if not calls[0]["prefills"]]


def keys_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    return policy(**{"name" if key == "policy" else key: value for key, value in plan.items()})


def ask(server: Server, prompts: Sequence[str]) -> list[list[int]]:
    """Greedy answers to the requests above."""

    def generate(request: tuple[int, float, int]) -> list[int]:
        number, start, length = request
        time.sleep(start)
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        return server.post("/generate", {"text": prompts[number], "sampling_params": sampling}, timeout=120)[
            "output_ids"
        ]

    alone = generate((15, 0.0, 5))
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return [alone, *threads.map(generate, REQUESTS)]


def serve(model: Path, tree: Path, flags: tuple[str, ...], scratch: Path) -> Answers:
    """What a server of several ranks does."""
    ranks = int(flags[flags.index("--tp") + 1])
    cores = "|".join("01"[rank % 2] for rank in range(ranks))
    server, probe, trace = make_server(model, tree, flags, scratch, {"SGLANG_CPU_OMP_THREADS_BIND": cores})
    with server:
        tokens = ask(server, read_prompts(model))
        calls = [[call for call in read_lines(probe) if call["rank"] == rank] for rank in range(ranks)]
        metrics = read_metrics(server, len(calls[0]) // LAYERS)
        return Answers(tokens, list(zip(*calls, strict=True)), metrics, read_lines(trace))


@pytest.fixture(scope="session")
def answers(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Answers]:
    """Call it with flags for what a server of a release's patched tree does."""

    @cache
    def run(flags: tuple[str, ...], release: str, patched: bool) -> Answers:
        tree = (patched_release if patched else pristine_release)(release)
        return serve(tiny_model, tree, flags, tmp_path_factory.mktemp("dp"))

    return lambda flags, release=LATEST, patched=True: run(tuple(flags), release, patched)


def live(call: dict[str, Any]) -> torch.Tensor:
    """[rows] bool by what the scheduler has synchronized: each rank's rows begin with its own, without padding."""
    live = [torch.arange(padded) < own for own, padded in zip(call["own"], call["padded"], strict=True)]
    return torch.cat(live)


def select_again(
    call: dict[str, Any],
    plan: Mapping[str, Any],
    tokens_per_request: int = 1,
    valid: torch.Tensor | None = None,
    rank_of_expert: Sequence[int] | None = None,
) -> Selection:
    """The reference selection over a recorded call."""
    batch = Batch(valid, tokens_per_request)
    return select(read_logits(call), build_plan(dict(plan)), Router(TOP_K), batch, rank_of_expert, backend="reference")


def experts(active: torch.Tensor) -> list[int]:
    return active.nonzero().flatten().tolist()


def check_steps(answers: Answers, plan: Mapping[str, Any], tokens_per_request: int = 1) -> None:
    """Every rank runs the experts that the reference selects over the live rows of all, counted once."""
    before = after = told = 0
    for calls in answers.steps:
        assert len({(call["layer"], call["rows"], call["prefills"]) for call in calls}) == 1, "ranks are in step"
    for calls in answers.selecting:
        first = calls[0]
        assert len({call["logits"] for call in calls}) == 1, "every rank's router sees the same rows"
        selection = select_again(first, plan, tokens_per_request, live(first))
        for call in calls:
            assert call["active"] == experts(selection.active)
        told += not selection.active.equal(select_again(first, plan, tokens_per_request).active)
        before += int(selection.vanilla_active.sum())
        after += len(first["active"])
    assert told > 0, "some step would have selected otherwise with its padding rows"
    assert 0 < after < before
    for calls in answers.steps:
        assert not calls[0]["prefills"] or all(call["after"] == call["before"] for call in calls)
    steps = answers.selecting
    assert answers.metrics["layer_steps_total"] == len(steps)
    assert answers.metrics["experts_before_total"] == before
    assert answers.metrics["experts_after_total"] == after
    assert answers.metrics["rows_total"] == sum(sum(calls[0]["own"]) for calls in steps)
    assert answers.metrics["steps policy"] == len(steps) / LAYERS
    assert answers.metrics["steps prefill"] == (len(answers.steps) - len(steps)) / LAYERS
    traced = [(record["batch_size"], record["experts_after"]) for record in answers.trace]
    assert traced == [(sum(calls[0]["own"]), calls[0]["after"]) for calls in steps]


def check_load(answers: Answers) -> None:
    """The load was uneven: an idle rank, a shorter one, and ranks that decode while another prefills."""
    loads = [calls[0]["own"] for calls in answers.selecting]
    assert any(0 in own for own in loads)
    assert any(0 < min(own) < max(own) for own in loads)
    modes = [{call["mode"] for call in calls} for calls in answers.steps if calls[0]["prefills"]]
    assert {"EXTEND", "DECODE"} in modes or {"EXTEND", "IDLE"} in modes


def test_ranks_select_alike_over_the_rows_of_all(answers):
    served = answers((*keys_of(XSHARE), *TWO))
    check_load(served)
    check_steps(served, XSHARE)
    prefills = [{call["mode"] for call in calls} for calls in served.steps if calls[0]["prefills"]]
    assert {"EXTEND", "DECODE"} in prefills, "a rank's decode was vanilla while another prefilled"
    assert served.metrics["rank_comparisons_total"] >= 3
    assert served.metrics["rank_disagreements_total"] == 0


@pytest.mark.parametrize("release", OLDER)
def test_ranks_of_older_releases_select_alike(release, answers):
    served = answers((*keys_of(XSHARE), *OLD_TWO), release)
    check_load(served)
    check_steps(served, XSHARE)


def test_four_ranks_select_alike_also_where_rows_are_not_padded(answers):
    """One request on four ranks is gathered as one row, not as four."""
    served = answers((*keys_of(XSHARE | {"min_rows": 1}), *FOUR))
    check_load(served)
    check_steps(served, XSHARE)
    rows_by_rank = [calls[0]["padded"] for calls in served.selecting]
    assert {sorted(padded) == [0, 0, 0, 1] for padded in rows_by_rank} == {True, False}
    assert any(len(set(padded)) == 1 for padded in rows_by_rank)


@pytest.mark.parametrize("ranks", [TWO, TWO_OF_TWO], ids=["of one", "of two"])
def test_full_budget_answers_as_unpatched(ranks, answers):
    served = answers((*policy("xshare", k0=1, add=64, utility="full"), *ranks))
    unpatched = answers(TWO, patched=False)
    check_load(unpatched)
    assert not any(call["stage"] for calls in unpatched.steps for call in calls)
    assert served.tokens == unpatched.tokens
    assert served.metrics["steps policy"] == len(served.selecting) / LAYERS > 0


def test_verification_groups_by_request_across_ranks(answers, tiny_model):
    """Speculation does not mix: the others wait idle while a rank prefills."""
    served = answers((*eagle(tiny_model, CHAIN), *keys_of(PER_REQUEST), *TWO))
    check_load(served)
    check_steps(served, PER_REQUEST, DRAFT_TOKENS)
    assert {call["mode"] for calls in served.selecting for call in calls} == {"TARGET_VERIFY", "IDLE"}


def test_full_budget_verifies_as_unpatched_without_speculation(answers, tiny_model):
    served = answers((*eagle(tiny_model, CHAIN), *policy("xshare", k0=1, add=64, utility="full"), *TWO))
    wanted = answers(TWO, patched=False).tokens
    # A request may end within a verified draft: upstream hands out what it has.
    assert [tokens[: len(own)] for tokens, own in zip(served.tokens, wanted, strict=True)] == wanted


def test_each_expert_parallel_rank_loads_its_share(answers):
    """With as many attention-DP as expert-parallel ranks, upstream cannot return the experts' outputs on CPU."""
    served = answers((*keys_of(PER_RANK), *TWO_OF_TWO, "--ep-size", "4"))
    check_load(served)
    for calls in served.selecting:
        selection = select_again(calls[0], PER_RANK, valid=live(calls[0]), rank_of_expert=RANK_OF_EXPERT)
        active = experts(selection.active)
        shares = [[expert for expert in active if RANK_OF_EXPERT[expert] == rank] for rank in range(4)]
        assert [call["active"] for call in calls] == shares
    together = sum(call["after"] for calls in served.selecting for call in calls)
    assert served.metrics["experts_after_total"] == together > 0
