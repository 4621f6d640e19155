"""Precedence of overrides of the same key: a layer at some batch sizes, then a layer, then batch sizes."""

from policies.batches import build
from refused import refused
from sglang_xshare import build_plan


def test_a_layer_of_some_batch_sizes_wins_over_the_layer_and_the_layer_over_batch_sizes():
    schedule = build(
        k0=1,
        add=24,
        layers={"0-1": {"k0": 3, "add": 8}},
        by_rows={"4": {"k0": 2, "add": 16, "layers": {"0": {"k0": 4}}}},
    )
    wanted = {(0, 4): (4, 8), (1, 4): (3, 8), (2, 4): (2, 16), (0, 8): (3, 8), (2, 8): (1, 24)}
    found = {place: schedule.plan(*place) for place in wanted}
    assert found == {place: build_plan("xshare", k0=k0, add=add) for place, (k0, add) in wanted.items()}


def test_an_override_of_no_added_expert_ends_a_mass():
    """A count of 0 is a budget too: the warm-up alone."""
    schedule = build(mass=0.8, by_rows={"4": {"add": 0}})
    assert schedule.plan(0, 4) == build_plan("xshare", add=0)
    assert schedule.plan(0, 5) == build_plan("xshare", mass=0.8)


def test_a_cap_that_an_override_gives_beside_no_mass_is_refused():
    """A cap of the keys before ends with their mass; one that the override names itself is a mistake."""
    assert build(mass=0.8, max_add=9, by_rows={"4": {"mass": None}}).plan(0, 4).max_add is None
    with refused("max_add = 9"):
        build(mass=0.8, by_rows={"4": {"mass": None, "max_add": 9}})
