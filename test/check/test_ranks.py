"""What `check` estimates of several ranks: the one that a step waits for."""

import re

import pytest

from benchmark.common.paths import ROOT
from check.asking import QWEN, ask, say
from sglang_xshare.check.estimate import estimate_step
from sglang_xshare.check.weights import read_weights
from sglang_xshare.stage.record.figures import PREFIX
from sglang_xshare.stage.record.interval import Interval, format_log

pytestmark = pytest.mark.usefixtures("served")

PAGE = (ROOT / "docs" / "check.md").read_text()
RANKS = ("--tp", 8, "--ep-size", 8, "--dp-size", 8, "--enable-dp-attention")


def test_ranks_share_the_experts(write, capsys):
    one, eight = (ask(write, capsys, *ranks)[0] for ranks in ((), RANKS))
    assert one["fullest_rank_experts"] == one["active_experts"] == eight["active_experts"]
    assert one["active_experts"][0] / 8 < eight["fullest_rank_experts"][0] < one["active_experts"][0] / 2
    assert eight["step_ms"][0] < one["step_ms"][0]


def test_slices_of_experts_are_read_by_every_rank(write, capsys):
    """Tensor parallelism alone: each rank reads as many experts, an eighth of each, and of attention."""
    one, eight = (ask(write, capsys, *ranks)[0] for ranks in ((), ("--tp", 8)))
    assert eight["fullest_rank_experts"] == one["active_experts"]
    layer, rest = (row["moe_layer_us"][0] - 34 for row in (one, eight))
    assert rest == pytest.approx(layer / 8)


@pytest.mark.parametrize(("batch", "most"), [(8, 1), (9, 2), (16, 2)])
def test_a_step_waits_for_the_rank_with_most_whole_requests(batch, most, write, capsys):
    (row,) = ask(write, capsys, *RANKS, "--batch", batch, "--active", 10, 5)
    _, step = estimate_step(read_weights(write(QWEN)), 10, most * 1024, 4.8e12)
    assert row["step_ms"][0] == pytest.approx(step * 1e3)


def test_what_is_known_of_the_fullest_rank_is_not_the_models(write, capsys):
    (row,) = ask(write, capsys, "--active", 10, 5, *RANKS)
    assert (row["active_experts"], row["fullest_rank_experts"]) == (None, [10, 5])
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--active", 10, 5, *RANKS) == 0
    assert "of the fullest rank" in capsys.readouterr().out


def test_the_fullest_rank_is_counted_where_the_page_says(write, capsys):
    """Its line is the decode log's, and the numbers that it takes from there are taken."""
    interval = Interval(10, 800, 310, 9.0, 10, 0, {}, fullest_before=247, fullest_after=95)
    line = format_log(interval).rpartition(", ")[2]
    assert f", {line}\n" in PAGE
    assert f"{PREFIX}fullest_rank_experts_before_total" in PAGE
    counted = re.search(r"here\s+`--active ([\d.]+) ([\d.]+)`", PAGE).groups()
    assert "{} -> {}".format(*counted) in line
    (row,) = ask(write, capsys, "--tp", 4, "--ep-size", 4, "--active", *counted)
    assert row["fullest_rank_experts"] == [24.7, 9.5]
