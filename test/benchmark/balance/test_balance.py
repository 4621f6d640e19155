"""Expert-parallel ranks in simulation: the logits' fit, the bars on Table 2, and a small run of the command."""

import pytest

from benchmark.balance.logits import FITTED, RANK_OF_EXPERT, ROUTER, measure_plans
from benchmark.common.variant import parse_plan
from sglang_xshare import Batch, select


def measure(*policies: str, rows: int = 32) -> dict[str, float]:
    return measure_plans([parse_plan(policy) for policy in policies], FITTED[rows], 60)


@pytest.fixture(scope="module")
def published():
    return measure("xshare:k0=1,target_per_rank=5")


@pytest.mark.parametrize("rows", FITTED)
def test_vanilla_routing_is_the_papers(rows):
    found = measure("vanilla", rows=rows)
    active, fullest = FITTED[rows].paper
    assert found["active_experts"] == pytest.approx(active, rel=0.02)
    assert found["fullest_rank"] == pytest.approx(fullest, rel=0.04)
    assert found["kept_mass"] == found["least_kept_mass"] == 1


def test_algorithm_6_divides_the_fullest_rank_by_more_than_the_papers_2_8(published):
    assert published["fullest_rank"] <= measure("vanilla")["fullest_rank"] / 2.8


def test_fill_takes_a_fifth_off_algorithm_6_and_keeps_as_much(published):
    found = measure("xshare:k0=0,target_per_rank=6,balance=fill")
    assert found["fullest_rank"] <= 0.8 * published["fullest_rank"]
    assert found["kept_mass"] >= published["kept_mass"]


def test_figures_are_those_of_the_reference():
    plan, found = parse_plan("xshare:k0=1,target_per_rank=5"), []
    for logits in FITTED[8].draw(3):
        out = select(logits, plan, ROUTER, Batch(), RANK_OF_EXPERT, backend="reference")
        found.append(max(sum(out.active[rank * 32 : rank * 32 + 32].tolist()) for rank in range(8)))
    assert measure_plans([plan], FITTED[8], 3)["fullest_rank"] == pytest.approx(sum(found) / 3)
