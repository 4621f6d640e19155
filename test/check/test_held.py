"""The parts of one rank: KV heads, which are not divided beyond their number, and redundant experts."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare.check.weights import Weights, count_cache, count_held

MODEL: Any = SimpleNamespace(num_experts=6)
WEIGHTS = Weights(MODEL, 2, expert=8, dense=8, held=24, cache=400, cache_heads=4, bits=None, source="safetensors")


@pytest.mark.parametrize(
    ("ranks", "dp_size", "stages", "cache"),
    [(1, 1, 1, 400), (2, 1, 1, 200), (4, 1, 1, 100), (8, 1, 1, 100), (8, 2, 1, 100), (8, 4, 1, 200), (8, 1, 2, 50)],
)
def test_heads_of_the_cache_are_divided_among_the_ranks_of_a_group_up_to_their_number(ranks, dp_size, stages, cache):
    flags: Any = SimpleNamespace(ranks=ranks, dp_size=dp_size, stages=stages, ep_size=1)
    assert count_cache(WEIGHTS, flags) == cache


@pytest.mark.parametrize(("redundant", "slots", "experts"), [(0, None, 24), (2, None, 32), (2, 5, 20), (2, 9, 32)])
def test_a_rank_holds_redundant_experts_too_or_as_many_as_there_are_slots(redundant, slots, experts):
    """Bytes of a rank of four: two layers of six experts of 8 bytes, and a quarter of all else."""
    flags: Any = SimpleNamespace(ranks=4, dp_size=1, stages=1, ep_size=4, redundant=redundant, slots=slots)
    assert count_held(WEIGHTS, flags) == (experts, 6)
