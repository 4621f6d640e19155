"""Ranks select the same experts bit for bit, over thousands of steps on 2 and 4 processes; what differs is found."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmark.common.paths import ROOT
from sglang_xshare.stage.gather import Ranks
from sglang_xshare.stage.record.agreement import EVERY, Agreement
from stage import ranks_that_select
from stage.ranks_that_select import INJECTED, LAYERS, STEPS
from stage.record.tally import make_tally


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_agree_over_thousands_of_steps_and_one_wrong_bit_is_found(size, tmp_path):
    """Each rank selects alone, every other at times by the reference; the last has one expert too many, once."""
    script = [sys.executable, str(Path(ranks_that_select.__file__)), str(size), str(tmp_path)]
    env = {"PYTHONPATH": f"{ROOT / 'test'}:{ROOT / 'python'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    first = answers[0]["active"]
    assert first.shape == (STEPS * LAYERS, 32)
    assert 0 < first.float().mean() < 1
    early = [count for count in range(1, EVERY) if count & (count - 1) == 0]
    comparisons = [*early, *range(EVERY, STEPS + 1, EVERY)]
    found = next(number for number, count in enumerate(comparisons) if count > INJECTED)
    for answer in answers:
        assert answer["active"].equal(first)
        assert answer["seen"] == [(count, [size - 1] * (number == found)) for number, count in enumerate(comparisons)]
        assert answer["total"] == {"comparisons": len(comparisons), "disagreements": 1}


def make(others, size=2):
    """An agreement of `size` ranks whose other ranks have the checksums that `others` makes of this one's."""
    return Agreement(size, "cpu", lambda own, ranks: torch.cat([own, *others(own)]))


def test_the_order_of_steps_and_the_layer_matter():
    one, two = (3, 3), (5, 5)
    checksums = []
    for steps in ([[one, two], [two, one]], [[two, one], [one, two]], [[one, None]], [[None, one]], [[None, two]]):
        agreement = make(lambda own: [own])
        for step in steps:
            agreement.count(make_tally(step).active)
        checksums.append(int(agreement._checksum))
    assert len({*checksums, 0}) == 6


def test_steps_without_a_selection_are_no_comparison():
    agreement = make(lambda own: [own])
    agreement.end_forward(None)
    assert agreement.counts == Counter()
    agreement.count(make_tally([(0, 0)]).active)  # a graph's capture
    agreement.end_forward(None)
    assert agreement.counts == Counter()
    agreement.count(make_tally([(2, 2)]).active)
    for _ in range(2):
        agreement.end_forward(None)
    assert agreement.counts == Counter(comparisons=1)


def test_a_switch_starts_anew_without_the_steps_of_the_former_policy():
    agreement = make(lambda own: [torch.zeros_like(own)])  # the other rank has selected nothing
    agreement.count(make_tally([(2, 2)]).active)
    agreement.begin()
    assert (agreement.end_forward(None), agreement.counts) == ([], Counter())


def test_all_ranks_are_compared_with_the_first():
    agreement = make(lambda own: [own + 1, own + 2, own], 4)
    agreement.count(make_tally([(2, 2)]).active)
    assert agreement.end_forward(Ranks(0, 4, 2, 32, together=True)) == [1, 2]
    assert agreement.counts == Counter(comparisons=1, disagreements=2)


@pytest.mark.parametrize("share", [1, 2])
def test_ranks_that_select_apart_are_not_compared(share):
    agreement = make(lambda own: pytest.fail("a collective"), 4)
    assert agreement.end_forward(Ranks(0, 4, share, 32, together=False)) == []
    assert agreement.counts == Counter()
