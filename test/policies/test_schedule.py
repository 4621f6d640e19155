"""Where and when a policy applies: phases, batch sizes, layers."""

from dataclasses import replace
from typing import Any

import pytest

from policies.batches import build
from refused import refused
from selection.cases import spell
from sglang_xshare import build_plan
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.policies.spelling import parse_policy


def test_phases_and_closed_limits():
    """A batch of one row is vanilla by default."""
    assert [build().reason_to_skip("decode", rows) for rows in (1, 2)] == ["min_rows", None]
    reasons = [build(min_rows=4, max_rows=16).reason_to_skip("decode", rows) for rows in (3, 4, 16, 17)]
    assert reasons == ["min_rows", None, None, "max_rows"]
    assert build(min_rows=4, max_rows=4).reason_to_skip("decode", 4) is None
    assert build(speculative=True).reason_to_skip("verify", 8) is None
    assert build(speculative=True, phases=["verify"]).reason_to_skip("decode", 8) == "phase"


def test_an_estimate_is_put_where_it_is_asked_for():
    """And where it is not, a schedule stays what it is."""
    schedule = build(speculative=True, k0=1, acceptance="auto", layers={"1": {"acceptance": 0.5}})
    assert [schedule.plan(layer, 8).acceptance for layer in (0, 1)] == [63 / 64, 0.5]
    weighed = schedule.weigh(0.25)
    assert [weighed.plan(layer, 8).acceptance for layer in (0, 1)] == [0.25, 0.5]
    assert (weighed.given, weighed.keys) == (schedule.given, schedule.keys)
    plain = build(speculative=True, acceptance=0.5)
    assert plain.weigh(0.25) is plain


OVERRIDES: dict[str, tuple[dict[str, Any], dict[tuple[int, int], str]]] = {  # keys, and plans by (layer, rows)
    "later ones win, and layers win over batch sizes": (
        {"k0": 1, "add": 24, "by_rows": {"2-8": {"add": 30, "k0": 2}, "4": {"add": 40}}}
        | {"layers": {"0-1": {"k0": 3}, "1": {"k0": 4}}},
        {(2, 16): "xshare:k0=1,add=24", (2, 8): "xshare:k0=2,add=30", (2, 4): "xshare:k0=2,add=40"}
        | {(0, 4): "xshare:k0=3,add=40", (1, 16): "xshare:k0=4,add=24"},
    ),
    "a layer of some batch sizes wins over the layer, and the layer over batch sizes": (
        {"k0": 1, "add": 24, "layers": {"0-1": {"k0": 3, "add": 8}}}
        | {"by_rows": {"4": {"k0": 2, "add": 16, "layers": {"0": {"k0": 4}}}}},
        {(0, 4): "xshare:k0=4,add=8", (1, 4): "xshare:k0=3,add=8", (2, 4): "xshare:k0=2,add=16"}
        | {(0, 8): "xshare:k0=3,add=8", (2, 8): "xshare:k0=1,add=24"},
    ),
    "a count of 0 is a budget too, which ends a mass: the warm-up alone": (
        {"mass": 0.8, "by_rows": {"4": {"add": 0}}},
        {(0, 4): "xshare:add=0", (0, 5): "xshare:mass=0.8"},
    ),
    "a range may end at min_rows, and another begin at max_rows": (
        {"k0": 1, "add": 24, "min_rows": 4, "max_rows": 8, "by_rows": {"2-4": {"k0": 2}, "8-12": {"k0": 3}}},
        {(0, 4): "xshare:k0=2,add=24", (0, 6): "xshare:k0=1,add=24", (0, 8): "xshare:k0=3,add=24"},
    ),
    "another policy starts from its own defaults": (
        {"k0": 2, "add": 12, "layers": {"0": {"policy": "oea"}, "1": {"policy": "vanilla"}}},
        {(0, 16): "oea", (1, 16): "vanilla", (2, 16): "xshare:k0=2,add=12"},
    ),
    "a count ends a mass: both together would be the larger": (
        {"by_rows": {"2": {"add": 3}, "4": {"target_per_rank": 5}, "6": {"k0": 2}, "8": {"add": 3, "mass": 0.5}}},
        {(0, 2): "xshare:add=3", (0, 4): "xshare:target_per_rank=5", (0, 6): "xshare:k0=2,mass=0.85"}
        | {(0, 8): "xshare:add=3,mass=0.5"},
    ),
    "null, and none of a request's, end no mass": (
        {"mass": 0.8, "layers": {"0": {"target_per_rank": None}, "1": {"add_per_request": 0}, "2": {"mass": None}}},
        {(0, 4): "xshare:mass=0.8", (1, 4): "xshare:mass=0.8", (2, 4): "xshare:mass=null"},
    ),
    "a mass ends counts": (
        {"add": 9, "add_per_request": 4, "by_rows": {"2": {"mass": 0.5}, "4": {"mass": None}}},
        {(0, 2): "xshare:mass=0.5", (0, 4): "xshare:add=9,add_per_request=4", (0, 6): "xshare:add=9,add_per_request=4"},
    ),
    "what ends a mass ends its cap": (
        {"mass": 0.8, "max_add": 9}
        | {"by_rows": {"2": {"add": 3}, "4": {"mass": None}, "6": {"mass": 0.5}, "8": {"max_add": None}}},
        {(0, 2): "xshare:add=3", (0, 4): "xshare:mass=null", (0, 6): "xshare:mass=0.5,max_add=9"}
        | {(0, 8): "xshare:mass=0.8", (0, 10): "xshare:mass=0.8,max_add=9"},
    ),
    "what ends a target of ranks ends its balance": (
        {"target_per_rank": 2, "balance": "level"}
        | {"by_rows": {"2": {"mass": 0.5}, "4": {"target_per_rank": None, "add": 3}}}
        | {"layers": {"1": {"mass": 0.5, "target_per_rank": 4}}},
        {(0, 2): "xshare:mass=0.5", (0, 4): "xshare:add=3", (0, 6): "xshare:target_per_rank=2,balance=level"}
        | {(1, 6): "xshare:mass=0.5,target_per_rank=4,balance=level"},
    ),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(case):
    keys, wanted = OVERRIDES[case]
    schedule = build(speculative=True, **keys)
    plans = {place: None if text == "vanilla" else spell(text) for place, text in wanted.items()}
    assert {place: schedule.plan(*place) for place in wanted} == plans


def test_a_cap_that_an_override_gives_beside_no_mass_is_refused():
    """A cap of the keys before ends with their mass; one that the override names itself is a mistake."""
    with refused("max_add = 9"):
        build(mass=0.8, by_rows={"4": {"mass": None, "max_add": 9}})
    with refused("balance = 'fill'"):
        build(target_per_rank=2, by_rows={"4": {"mass": 0.5, "balance": "fill"}})


def test_plans_finds_every_combination():
    schedule = build(k0=1, add=24, by_rows={"4-8": {"add": 8}}, layers={"1-2": {"k0": 2}})
    wanted = {build_plan("xshare", k0=k0, add=add) for k0 in (1, 2) for add in (8, 24)}
    assert set(schedule.plans()) == set(schedule.plans(range(4))) == wanted
    assert set(build(add=3, layers={"0": {"k0": 2}}).plans(range(1))) == {build_plan("xshare", k0=2, add=3)}
    inner = build(k0=1, add=24, by_rows={"4": {"layers": {"3": {"k0": 2}}}})
    assert {plan.k0 for plan in inner.plans()} == {1, 2}
    with refused("layers 3"):
        inner.plans(range(3))


def test_a_share_by_rows_goes_with_overrides():
    """Layers and batch sizes change other keys beside it, or take a number, a count or another policy in its place."""
    schedule = build(
        by_rows={"4-9": {"k0": 2}, "32": {"mass": 0.5}},
        layers={"1": {"mass": "fast"}, "2": {"add": 3}, "3": {"policy": "oea"}, "4": {"k0": 3}},
    )
    at = {0: (0.85, 0.85, 0.9, 0.93, 0.5), 1: (0.8, 0.8, 0.85, 0.9, 0.9), 4: (0.85, 0.85, 0.9, 0.93, 0.5)}
    for layer, masses in at.items():
        assert tuple(schedule.plan(layer, rows).mass for rows in (3, 7, 8, 16, 32)) == masses
    assert [schedule.plan(0, rows).k0 for rows in (3, 4, 8, 9, 10)] == [1, 2, 2, 2, 1]
    assert schedule.plan(2, 8) == build_plan("xshare", k0=2, add=3)
    assert schedule.plan(3, 8) == build_plan("oea")
    assert {schedule.plan(layer, rows) for layer in range(5) for rows in range(2, 34)} == set(schedule.plans(range(5)))


def test_an_override_to_xshare_has_its_share_by_rows():
    schedule = build("oea", layers={"0": {"policy": "xshare"}}, by_rows={"20": {"policy": "xshare", "mass": "careful"}})
    assert [schedule.plan(0, rows).mass for rows in (2, 8, 16)] == [0.85, 0.9, 0.93]
    assert schedule.plan(1, 16) == build_plan("oea")
    assert schedule.plan(1, 20) == build_plan("xshare", mass=0.97)
    assert schedule.plan(0, 20) == build_plan("xshare", mass=0.97), "the layer names the policy of the batch size"
    wide = build("oea", by_rows={"2-99": {"policy": "xshare"}})
    assert [wide.plan(0, rows).mass for rows in (2, 8, 16)] == [0.85, 0.9, 0.93]


@pytest.mark.parametrize("other", [{"add": 0}, {"add": 3}, {"add_per_request": 4}, {"target_per_rank": 5}])
def test_a_share_of_the_utility_is_kept_if_no_other_budget_is_given(other):
    """A plan alone, which has no rows, keeps what one of 8 rows does."""
    assert build_plan("xshare") == build_plan("xshare", k0=1, add=0, mass=0.9)
    assert build_plan("xshare", max_add=5) == build_plan("xshare", k0=1, add=0, mass=0.9, max_add=5)
    assert build_plan("xshare", add_per_request=0, target_per_rank=None) == build_plan("xshare")
    assert build_plan("xshare", **other).mass is None
    assert build_plan("xshare", mass=0.5, **other).mass == 0.5


SIZES = (1, 7, 8, 15, 16, 2000)
MASSES = {
    "xshare": (0.85, 0.85, 0.9, 0.9, 0.93, 0.93),
    "xshare:careful": (0.93, 0.93, 0.95, 0.95, 0.97, 0.97),
    "xshare:fast": (0.8, 0.8, 0.85, 0.85, 0.9, 0.9),
    "xshare:careful,mass=0.9": (0.9,) * 6,
    "xshare:careful,add=24": (None,) * 6,
}


@pytest.mark.parametrize("policy", MASSES)
@pytest.mark.parametrize("speculative", [False, True])
def test_the_share_follows_the_steps_rows_unless_it_is_given(policy, speculative):
    name, keys = parse_policy(policy)
    schedule = build_schedule(name, {**keys, "min_rows": 1}, speculative)
    assert tuple(schedule.plan(3, rows).mass for rows in SIZES) == MASSES[policy]
    for plans in (schedule.plans(), schedule.plans(range(4))):
        assert {plan.mass for plan in plans} == set(MASSES[policy])
    # A switch or a check looks at no plan that no step gets.
    assert {plan.mass for plan in build(min_rows=9).plans()} == {0.9, 0.93}
    assert {plan.mass for plan in build(max_rows=15).plans()} == {0.85, 0.9}


BY_REQUEST, OBSERVED = {"add_per_request": 2}, {"policy": "oea", "exact": {"default": True}}
REFUSED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "phases is no list": ("xshare", False, {"phases": "decode"}),
    "phases is empty": ("xshare", False, {"phases": []}),
    "unknown phase": ("xshare", False, {"phases": ["prefill"]}),
    "verify without speculation": ("xshare", False, {"phases": ["verify"]}),
    "decode with speculation": ("xshare", True, {"phases": ["decode"]}),
    "min_rows is text": ("xshare", False, {"min_rows": "2"}),
    "min_rows is zero": ("xshare", False, {"min_rows": 0}),
    "max_rows is a bool": ("xshare", False, {"max_rows": True}),
    "max_rows is null": ("xshare", False, {"max_rows": None}),
    "a key of another version": ("xshare", False, {"max_tokens": 8}),
    "rows of one request": ("xshare", False, {"rows": "request"}),
    "exact is a word": ("xshare", False, {"exact": "default"}),
    "exact of nothing": ("xshare", False, {"exact": {}}),
    "exact of an unknown key": ("xshare", False, {"exact": {"prio": 1}}),
    "exact from a priority in words": ("xshare", False, {"exact": {"priority": "10"}}),
    "exact from a priority that no message carries": ("xshare", False, {"exact": {"priority": -(2**64)}}),
    "min_rows that no step can have": ("xshare", False, {"min_rows": 2**31}),
    "exact by a number": ("xshare", False, {"exact": {"default": 1}}),
    "exact requests of what is observed": ("observe", False, {"plans": [OBSERVED]}),
    "an estimate without drafts": ("xshare", False, {"acceptance": "auto"}),
    "an estimate that is observed": ("observe", True, {"plans": ["xshare:k0=1,acceptance=auto"]}),
    "a rank's rows under observe": ("observe", False, {"plans": ["xshare:k0=1,add=8,rows=rank"]}),
    "max below min": ("xshare", False, {"min_rows": 8, "max_rows": 4}),
    "max below the default min": ("xshare", False, {"max_rows": 1}),
    "layers is a list": ("xshare", False, {"layers": [0]}),
    "layer is no number": ("xshare", False, {"layers": {"first": {}}}),
    "range runs backwards": ("xshare", False, {"layers": {"3-1": {}}}),
    "range in other digits": ("xshare", False, {"layers": {"٣": {}}}),
    "batch of no row": ("xshare", False, {"by_rows": {"0": {"k0": 2}}}),
    "batch the policy never sees": ("xshare", False, {"by_rows": {"1": {"k0": 2}}}),
    "batch above max_rows": ("xshare", False, {"max_rows": 8, "by_rows": {"9-12": {"k0": 2}}}),
    "override is no object": ("xshare", False, {"layers": {"0": 2}}),
    "override holds a common key": ("xshare", False, {"layers": {"0": {"min_rows": 4}}}),
    "layers within layers": ("xshare", False, {"layers": {"0": {"layers": {"1": {"k0": 2}}}}}),
    "no expert at all": ("custom", False, {}),
    "no expert at one batch size": ("xshare", False, {"k0": 0, "add": 8, "by_rows": {"4": {"add": 0}}}),
    "override holds a wrong value": ("xshare", False, {"layers": {"7": {"k0": -1}}}),
    "override holds a wrong key between two sizes": ("xshare", False, {"by_rows": {"6-8": {"kmax": 4}}}),
    "override's policy needs a key": ("xshare", False, {"layers": {"1": {"policy": "moe-spec"}}}),
    "nothing is left": ("xshare", False, {"by_rows": {"1-9999": {"policy": "vanilla"}}, "max_rows": 64}),
    "budget by request without speculation": ("xshare", False, {"k0": 1, "add_per_request": 4}),
    "budget by request in an override without speculation": ("xshare", False, {"by_rows": {"8": BY_REQUEST}}),
    "custom budget by request without speculation": ("custom", False, {"add": 8, "add_per_request": 1}),
    "ranking by request in decode": ("moe-spec", False, {"budget": 8, "scope": "request", "phases": ["decode"]}),
    "custom ranking by request without speculation": ("custom", False, {"budget": 8, "scope": "request"}),
    "policy among the keys": ("xshare", False, {"policy": "oea"}),
}


def refuse(case: str, *_: Any) -> None:
    policy, speculative, config = REFUSED[case]
    build_schedule(policy, config, speculative)


def test_policies_by_request_need_speculation():
    assert build("xshare", speculative=True, k0=1, add_per_request=4).plans()[0].add_per_request == 4
    assert build("moe-spec", speculative=True, budget=8, scope="request").plans()[0].scope == "request"


def test_layers_must_be_the_models():
    schedule = build(layers={"2-4": {"k0": 2}})
    assert schedule.plans(range(5))
    with refused("layers 4"):
        schedule.plans(range(4))
    with refused("layers 2 to 4"):
        schedule.plans((1, 5))


def test_all_layers_vanilla_is_found_once_their_number_is_known():
    schedule = build(layers={"0-3": {"policy": "vanilla"}})
    with pytest.raises(ValueError, match="must leave the policy a layer and batch size"):
        schedule.plans(range(4))


def test_a_plan_is_built_once_and_only_for_its_own_schedule():
    schedule = build(k0=1, add=24)
    assert schedule.plan(0, 4) is schedule.plan(0, 4)
    other = replace(schedule, keys={"k0": 2, "add": 24})
    assert (other.plan(0, 4).k0, schedule.plan(0, 4).k0) == (2, 1)


@pytest.mark.parametrize("key", ["layers", "by_rows"])
def test_more_ranges_than_a_server_can_plan_for_in_seconds_are_refused(key):
    build_schedule("xshare", {key: {str(first): {"mass": 0.9} for first in range(2, 1026)}}, False)
    with pytest.raises(ValueError, match=r"must have at most 1,024 ranges together \(got 1,025\)"):
        build_schedule("xshare", {key: {str(first): {"mass": 0.9} for first in range(2, 1027)}}, False)


def test_ranges_of_layers_and_sizes_are_limited_by_the_parts_that_both_make():
    def divide(sizes):
        keys = {"layers": {str(layer): {"k0": 1 + layer % 2} for layer in range(31)}}
        return build_schedule("xshare", keys | {"by_rows": {str(2 + 2 * i): {"add": i} for i in range(sizes)}}, False)

    divide(64)
    with pytest.raises(ValueError, match=r"must divide layers and rows into at most 4,096 parts \(got 4,160\)"):
        divide(65)


def test_plans_of_a_model_are_those_of_each_of_its_layers():
    schedule = build(k0=1, add=24, layers={"0-3": {"k0": 2}, "5": {"k0": 3}, "7-9": {"k0": 4}})
    for layers in (range(10), (1, 4, 5, 9), (2, 5, 6, 9)):
        found = {schedule.plan(layer, rows) for layer in layers for rows in (2, 8)}
        assert set(schedule.plans(layers)) == found
