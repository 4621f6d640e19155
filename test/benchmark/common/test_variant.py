"""A compared policy as it is spelt: its plan, or one clear line."""

import pytest

from benchmark.common.variant import parse_plan
from sglang_xshare import build_plan


def test_a_plan_is_spelt_as_for_the_server():
    assert parse_plan("xshare:k0=2,add=12,utility=full") == build_plan("xshare", k0=2, add=12, utility="full")
    assert parse_plan('oea:{"k0": 3}') == build_plan("oea", k0=3)
    assert parse_plan("off") == parse_plan("vanilla") == build_plan("vanilla")
    assert parse_plan("xshare") == build_plan("xshare", k0=1, mass=0.9)


def test_a_plan_that_needs_a_server_is_refused():
    with pytest.raises(ValueError, match=r"policy must be .* without phases, min_rows, .*min_rows needs a server"):
        parse_plan("xshare:k0=1,min_rows=4")
