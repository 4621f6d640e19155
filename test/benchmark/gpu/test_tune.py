"""Experiment `tune`, with a stand-in layer and timer; routing, the override and the files are upstream's own."""

from itertools import product
from math import inf
from time import monotonic

import torch

from benchmark.gpu.launch import CHOICES, agree, complete, descend
from benchmark.gpu.tune import plan_at
from sglang_xshare import build_plan

START = complete({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1})


def test_a_policy_applies_as_in_a_server():
    assert plan_at("oea:k0=3", 1) == build_plan("vanilla")  # a batch of one row is vanilla
    assert plan_at("oea:k0=3", 2) == build_plan("oea", k0=3)
    assert plan_at('oea:{"k0": 3, "by_rows": {"8-64": {"k0": 5}}}', 16) == build_plan("oea", k0=5)
    assert plan_at("off", 16) == build_plan("vanilla")


LATER = monotonic() + 3600
FASTEST = {**START, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "num_stages": 2, "num_warps": 8, "GROUP_SIZE_M": 16}


def cost(config):
    """Each step away from the best costs a tenth more."""
    steps = sum(abs(values.index(config[name]) - values.index(FASTEST[name])) for name, values in CHOICES.items())
    return 100 * 1.1**steps


def test_the_search_finds_the_best_with_far_fewer_trials_than_there_are_launches():
    tried = []
    found = descend([START], lambda config, _: tried.append(tuple(config.values())) or cost(config), LATER)
    assert found == (FASTEST, True)
    assert len(set(tried)) == len(tried) < 40 < len(list(product(*CHOICES.values()))) / 4


def test_the_search_goes_around_launches_that_fail_and_noise_is_no_gain():
    best, _ = descend([START], lambda config, _: inf if config["BLOCK_SIZE_K"] == 256 else cost(config), LATER)
    assert best == {**FASTEST, "BLOCK_SIZE_K": 128}
    assert descend([START], lambda *_: inf, LATER) == (START, True)
    times = iter([100.0, *[99.8] * 100])
    assert descend([START], lambda *_: next(times), LATER)[0] == START


def test_agreement_is_up_to_rounding():
    expected = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    alike = [agree(found, expected) for found in (expected.bfloat16(), expected * 1.01, torch.zeros(4, 64))]
    assert alike == [True, True, False]
    for wrong in (expected[0, 0] + 0.2, torch.tensor(float("nan"))):
        found = expected.clone()
        found[0, 0] = wrong
        assert not agree(found, expected)
