"""The search for a launch, by times that no GPU took: it finds the fastest, and goes around launches that fail."""

from itertools import product
from math import inf
from time import monotonic

import torch

from benchmark.gpu.launch import CHOICES, agree, complete, descend

LATER = monotonic() + 3600
START = complete({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1})
BEST = {**START, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "num_stages": 2, "num_warps": 8, "GROUP_SIZE_M": 16}


def cost(config, best=BEST):
    """Each step away from the best costs a tenth more."""
    steps = sum(abs(values.index(config[name]) - values.index(best[name])) for name, values in CHOICES.items())
    return 100 * 1.1**steps


def test_the_search_finds_the_best_with_far_fewer_trials_than_there_are_launches():
    tried = []
    found = descend([START], lambda config, _: tried.append(tuple(config.values())) or cost(config), LATER)
    assert found == (BEST, 100.0, True)
    assert len(set(tried)) == len(tried) < 40 < len(list(product(*CHOICES.values()))) / 4


def test_the_search_goes_around_launches_that_fail_and_noise_is_no_gain():
    best, *_ = descend([START], lambda config, _: inf if config["BLOCK_SIZE_K"] == 256 else cost(config), LATER)
    assert best == {**BEST, "BLOCK_SIZE_K": 128}
    assert descend([START], lambda *_: inf, LATER)[1] == inf
    times = iter([100.0, *[99.8] * 100])
    assert descend([START], lambda *_: next(times), LATER)[0] == START


def test_agreement_is_up_to_rounding():
    expected = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert agree(expected.bfloat16(), expected)
    assert agree(expected * 1.01, expected)
    for wrong in (expected[0, 0] + 0.2, torch.tensor(float("nan"))):
        found = expected.clone()
        found[0, 0] = wrong
        assert not agree(found, expected)
    assert not agree(torch.zeros(4, 64), expected)
