"""Several ranks on one machine: tensor parallel, expert parallel, and replicas."""

import json

import pytest

from benchmark.common.server import bind_ranks
from served.answers import LAYERS, SERVERS, policy
from served.eagle import select_again
from served.ranks import PER_RANK, TWO_CORES, XSHARE

pytestmark = pytest.mark.long

EXPERTS = 64
RANK_OF_EXPERT = [0] * 32 + [1] * 32
EXPERT_PARALLEL = ("--tp", "2", "--ep-size", "2")


def split_by_rank(answers):
    """The decode calls of two ranks, in step."""
    calls = answers.calls("DECODE", least=2)
    ranks = [[call for call in calls if call["rank"] == rank] for rank in (0, 1)]
    assert [call["layer"] for call in ranks[0]] == [call["layer"] for call in ranks[1]]
    return ranks


def test_two_tensor_parallel_ranks_answer_as_one(asked, served):
    answers = asked(*SERVERS["xshare"], "--tp", "2", env=TWO_CORES)
    assert answers.tokens == served("xshare").tokens
    first, second = split_by_rank(answers)
    assert [call["active"] for call in first] == [call["active"] for call in second]
    # Both ranks run every layer; only one of them reports.
    assert answers.metrics["layer_steps_total"] == len(first) > 0
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in first)
    assert [record["experts_after"] for record in answers.trace] == [call["after"] for call in first]
    assert answers.metrics["rank_comparisons_total"] >= 3
    assert answers.metrics["rank_disagreements_total"] == 0


def test_each_expert_parallel_rank_loads_its_share(asked):
    answers = asked(*policy("xshare", k0=1, target_per_rank=5), *EXPERT_PARALLEL, env=TWO_CORES)
    first, second = split_by_rank(answers)
    for call, other in zip(first, second, strict=True):
        assert call["active"] + other["active"] == select_again(call, PER_RANK, rank_of_expert=RANK_OF_EXPERT)
        assert max(call["active"], default=0) < 32 <= min(other["active"], default=32)
    together = first + second
    assert sum(call["after"] for call in first) < sum(call["before"] for call in first)
    largest = sum(max(call["after"], other["after"]) for call, other in zip(first, second, strict=True))
    assert answers.metrics["fullest_rank_experts_after_total"] == largest
    assert answers.metrics["layer_steps_total"] == len(first) > 0
    assert answers.metrics["rank_comparisons_total"] >= 3
    assert answers.metrics["rank_disagreements_total"] == 0
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in together)
    assert answers.metrics["kept_mass_total"] == pytest.approx(sum(call["kept"] for call in together), rel=1e-5)
    assert answers.tokens[0] == answers.tokens[1]


def test_target_per_rank_follows_experts_to_where_they_are(tmp_path, asked):
    """SGLang is told to hold even experts on the first rank and odd ones on the second."""
    where = [*range(0, EXPERTS, 2), *range(1, EXPERTS, 2)]
    location = tmp_path / "location.json"
    location.write_text(json.dumps({"physical_to_logical_map": [where] * LAYERS}))
    flags = (*policy("xshare", k0=1, target_per_rank=5), *EXPERT_PARALLEL, "--init-expert-location", str(location))
    answers = asked(*flags, env=TWO_CORES)
    first, second = split_by_rank(answers)
    rank_of_expert = [expert % 2 for expert in range(EXPERTS)]
    for call, other in zip(first, second, strict=True):
        active = sorted(where[place] for place in call["active"] + other["active"])
        assert active == select_again(call, PER_RANK, rank_of_expert=rank_of_expert)
    largest = sum(max(call["after"], other["after"]) for call, other in zip(first, second, strict=True))
    assert answers.metrics["fullest_rank_experts_after_total"] == largest
    assert answers.metrics["fullest_rank_experts_before_total"] > largest
    assert "active experts of the fullest rank: " in answers.log


@pytest.mark.parametrize("target", [5, 32])
def test_target_per_rank_follows_experts_that_move(target, asked, served):
    """EPLB moves experts between the ranks while it serves; if each may use all of its own, no token changes."""
    moving = ("--enable-eplb", "--eplb-rebalance-num-iterations", "25")
    flags = (*policy("xshare", k0=1, target_per_rank=target), *EXPERT_PARALLEL, *moving)
    flags += ("--expert-distribution-recorder-buffer-size", "20")
    answers = asked(*flags, env=TWO_CORES, hosted=True)
    assert answers.log.count("rebalance end") >= 2
    assert (answers.tokens == served("unpatched").tokens) is (target == 32)
    first, second = split_by_rank(answers)
    largest = [max(call["after"], other["after"]) for call, other in zip(first, second, strict=True)]
    assert answers.metrics["fullest_rank_experts_after_total"] == sum(largest)
    assert answers.metrics["rank_disagreements_total"] == 0


def test_four_expert_parallel_ranks_answer_as_one(asked, served):
    """Every rank computes its own experts alone, and the tokens are those of the unpatched release on one rank."""
    ranks = 4
    answers = asked("--tp", "4", "--ep-size", "4", env=bind_ranks(4))
    assert answers.tokens == served("unpatched").tokens
    share = EXPERTS // ranks
    for call in answers.calls("DECODE"):
        assert all(expert // share == call["rank"] for expert in call["active"])
    assert {call["rank"] for call in answers.calls("DECODE")} == set(range(ranks))


def test_two_replicas_select_each_for_its_own_requests(asked):
    answers = asked(*SERVERS["xshare"], "--dp-size", "2", env=TWO_CORES, staggered=True)
    calls = answers.calls("DECODE", least=2)
    assert answers.log.count(f"Expert policy xshare on {LAYERS} MoE layers") == 2
    assert all(call["active"] == select_again(call, XSHARE) for call in calls)
    assert answers.metrics["layer_steps_total"] == len(calls) > 0
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in calls)
    assert answers.metrics["steps min_rows"] == answers.forwards("DECODE", most=1)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("shard",), "shard: each of 2 ranks holds a slice of every expert, 16 of its 32 columns; attention tensor-"),
        (
            ("shard", "--attn-dp-size", "2"),
            "shard: each of 2 ranks holds a slice of every expert, 16 of its 32 columns; attention data-parallel in 2 ",
        ),
        (("ep",), "ep: each of 2 ranks holds 32 whole experts; attention tensor-parallel"),
    ],
    ids=["slices", "slices, data-parallel attention", "whole"],
)
def test_experts_in_slices_and_whole_ones_answer_as_one_rank(flags, line, asked, served):
    """As `sglang serve --model-path DIR --tp 4 --expert-placement shard` does, on two ranks: it says what it chose, and
    the tokens are those of the unpatched release on one rank. The probe lends a CPU data-parallel attention.
    """
    answers = asked("--tp", "2", "--expert-placement", *flags, env=TWO_CORES, staggered=True)
    assert answers.tokens[0] == served("unpatched").tokens[0]
    assert f"expert placement {line}" in answers.log
