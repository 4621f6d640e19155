"""The KV cache of one rank: heads are divided as far as there are any, then every rank holds one."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare.check.weights import Weights, count_cache

MODEL: Any = None
WEIGHTS = Weights(MODEL, 1, expert=8, dense=8, held=8, cache=400, cache_heads=4, bits=None, source="safetensors")


@pytest.mark.parametrize(
    ("ranks", "dp_size", "stages", "cache"),
    [(1, 1, 1, 400), (2, 1, 1, 200), (4, 1, 1, 100), (8, 1, 1, 100), (8, 2, 1, 100), (8, 4, 1, 200), (8, 1, 2, 50)],
)
def test_heads_of_the_cache_are_divided_among_the_ranks_of_a_group_up_to_their_number(ranks, dp_size, stages, cache):
    flags: Any = SimpleNamespace(ranks=ranks, dp_size=dp_size, stages=stages, ep_size=1)
    assert count_cache(WEIGHTS, flags) == cache
