"""A wrong plan is one clear line, and a plan knows what it can do."""

import math
import re

import pytest

import sglang_xshare
from sglang_xshare import Router, SelectionPlan, build_plan
from sglang_xshare.plan import KEYS
from sglang_xshare.policies.spelling import parse_policy

INTEGER = "an integer of at least"
POLICIES = "vanilla, pruned, dynamic-skip, xshare, oea, lynx-lat, lynx-acc, moe-spec, custom, observe"
BUDGETS = "add, add_per_request, mass, target_per_rank"
PERMUTATION = "a list of all expert ids, each once"
STATIC = {"budget": 2, "ranking": "static"}
ORDER = {"ranking": "static", "order": [2, 0, 1]}


@pytest.mark.parametrize(
    ("policy", "keys", "line"),
    [
        # Types: nothing is converted.
        ("xshare", {"k0": True}, f"k0 = True: allowed is {INTEGER} 0"),
        ("xshare", {"k0": "3"}, f"k0 = '3': allowed is {INTEGER} 0"),
        ("xshare", {"k0": 3.0}, f"k0 = 3.0: allowed is {INTEGER} 0"),
        ("xshare", {"k0": None}, f"k0 = None: allowed is {INTEGER} 0"),
        ("xshare", {"add": [24]}, f"add = [24]: allowed is {INTEGER} 0"),
        ("xshare", {"mass": "0.5"}, "mass = '0.5': allowed is a number in (0, 1]"),
        ("xshare", {"mass": True}, "mass = True: allowed is a number in (0, 1]"),
        ("xshare", {"mass": math.nan}, "mass = nan: allowed is a number in (0, 1]"),
        ("xshare", {"utility": 1}, "utility = 1: allowed is one of topk, full, squared"),
        ("moe-spec", {"budget": 8, "coverage": "truncate", "rescue": 1}, "rescue = 1: allowed is true or false"),
        ("moe-spec", {**STATIC, "order": "012"}, f"order = '012': allowed is {PERMUTATION}"),
        # Ranges.
        ("xshare", {"k0": -1}, f"k0 = -1: allowed is {INTEGER} 0"),
        ("xshare", {"add": -24}, f"add = -24: allowed is {INTEGER} 0"),
        ("xshare", {"add_per_request": -1}, f"add_per_request = -1: allowed is {INTEGER} 0"),
        ("xshare", {"target_per_rank": 0}, f"target_per_rank = 0: allowed is {INTEGER} 1"),
        ("xshare", {"mass": 0}, "mass = 0: allowed is a number in (0, 1]"),
        ("xshare", {"mass": 1.01}, "mass = 1.01: allowed is a number in (0, 1]"),
        ("xshare", {"p": 0.0}, "p = 0.0: allowed is a number in (0, 1]"),
        ("oea", {"k0": 0}, f"k0 = 0: allowed is {INTEGER} 1"),
        ("oea", {"k0": 1, "kmax": 0}, f"kmax = 0: allowed is {INTEGER} 1"),
        ("oea", {"k0": 1, "max_rank": 0}, f"max_rank = 0: allowed is {INTEGER} 1"),
        ("pruned", {"k0": 0}, f"k0 = 0: allowed is {INTEGER} 1"),
        ("lynx-lat", {"retain": 0}, f"retain = 0: allowed is {INTEGER} 1"),
        ("lynx-lat", {"drop": -1}, f"drop = -1: allowed is {INTEGER} 0"),
        ("lynx-acc", {"confidence": 0}, "confidence = 0: allowed is a number in (0, 1]"),
        ("lynx-acc", {"confidence": 0.5, "max_voters": 0}, f"max_voters = 0: allowed is {INTEGER} 1"),
        ("moe-spec", {"budget": 0}, f"budget = 0: allowed is {INTEGER} 1"),
        ("dynamic-skip", {"beta": 1.5}, "beta = 1.5: allowed is a number in [0, 1]"),
        ("xshare", {"own_share": -0.1}, "own_share = -0.1: allowed is a number in [0, 1]"),
        ("oea", {"k0": 1, "own_share": 1.1}, "own_share = 1.1: allowed is a number in [0, 1]"),
        ("xshare", {"own_share": math.nan}, "own_share = nan: allowed is a number in [0, 1]"),
        ("xshare", {"own_share": None}, "own_share = None: allowed is a number in [0, 1]"),
        ("xshare", {"balance": "even"}, "balance = 'even': allowed is one of literal, fill, level"),
        ("moe-spec", {"budget": 8, "ranking": "votes"}, "ranking = 'votes': allowed is one of router, static"),
        ("moe-spec", {"budget": 8, "coverage": "own"}, "coverage = 'own': allowed is one of substitute, truncate"),
        # Permutations.
        *(
            ("moe-spec", {**STATIC, "order": order}, f"order = {order!r}: allowed is {PERMUTATION}")
            for order in ([], [0, 0, 1], [1, 2, 3], [0, 1, True], [0, 1.0], [0, [1]])
        ),
        # Names, and keys that are missing.
        ("nope", {}, f"policy = 'nope': allowed is one of {POLICIES}"),
        ({"k0": 1}, {}, "policy = {'k0': 1}: allowed is an object with a key \"policy\""),
        (
            "oea",
            {"k0": 1, "add": 2},
            "add = 2: oea has no such key; "
            "allowed is k0, p, kmax, max_rank, target_per_rank, free_residents, own_share",
        ),
        ("vanilla", {"k0": 1}, "k0 = 1: vanilla has no such key; allowed is none"),
        ("custom", {"policy_": 1}, f"policy_ = 1: custom has no such key; allowed is {', '.join(KEYS)}"),
        ("moe-spec", {}, f"budget is missing: moe-spec needs {INTEGER} 1"),
        ("lynx-acc", {"min_votes": 2}, "confidence is missing: lynx-acc needs a number in (0, 1]"),
        ("dynamic-skip", {}, "beta is missing: dynamic-skip needs a number in [0, 1]"),
        # Keys that rule each other out.
        ("lynx-lat", {}, "retain = None, drop = None: lynx-lat needs exactly one of them"),
        ("lynx-lat", {"retain": 8, "drop": 8}, "retain = 8, drop = 8: lynx-lat needs exactly one of them"),
        ("oea", {"k0": 3, "kmax": 2}, "kmax = 2: allowed only from k0 = 3 up"),
        ("xshare", {"balance": "fill"}, "balance = 'fill': allowed only with target_per_rank"),
        ("xshare", {"balance": "level"}, "balance = 'level': allowed only with target_per_rank"),
        ("moe-spec", {"budget": 2, "ranking": "static"}, "ranking = 'static': allowed only with order"),
        ("moe-spec", {"budget": 2, "order": [1, 0]}, "order = (1, 0): allowed only with ranking static"),
        (
            "moe-spec",
            {"budget": 2, "utility": "squared", **ORDER},
            "utility = 'squared': allowed only with ranking router, a static order asks no scores",
        ),
        ("moe-spec", {"budget": 2, "rescue": False}, "rescue = False: allowed only with coverage truncate"),
        ("custom", {"budget": 2, "add": 1}, f"budget = 2: allowed only without {BUDGETS} and confidence"),
        ("custom", {"confidence": 0.5, "mass": 0.5}, f"confidence = 0.5: allowed only without {BUDGETS}"),
        ("custom", {"budget": 2, "drop": 1, "ranking": "votes"}, "drop = 1: allowed only without budget"),
        ("custom", {"drop": 1}, "drop = 1: allowed only with ranking votes"),
        (
            "custom",
            {"drop": 1, "ranking": "votes", "add": 1},
            f"drop = 1: allowed only without {BUDGETS} and confidence",
        ),
        ("custom", {"ranking": "votes"}, "ranking = 'votes': allowed only with budget or drop"),
        ("custom", {"scope": "request"}, "scope = 'request': allowed only with budget or drop"),
        (
            "custom",
            {"coverage": "own", "add": 1},
            "coverage = 'own': allowed only without a budget, which its rows could not use",
        ),
        ("custom", {"k0": 1, "max_voters": 4}, "max_voters = 4: allowed only with confidence"),
        ("custom", {"k0": 1, "min_votes": 4}, "min_votes = 4: allowed only with confidence"),
        ("custom", {"beta": 0.5}, "beta = 0.5: allowed only with coverage own"),
        ("custom", {"coverage": "own", "kmax": 4}, "kmax = 4: allowed only with coverage substitute"),
        (
            "moe-spec",
            {"budget": 2, "coverage": "truncate", "own_share": 0.5},
            "own_share = 0.5: allowed only with coverage substitute or own",
        ),
        ("custom", {"coverage": "truncate", "max_rank": 4}, "max_rank = 4: allowed only with coverage substitute"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:40],
)
def test_a_wrong_plan_is_one_clear_line(policy, keys, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        build_plan(policy, **keys)


def test_numbers_take_their_normal_form():
    """So that equal plans are equal, and an order from JSON can be hashed."""
    plan = build_plan("xshare", mass=1)
    assert plan == build_plan("xshare", mass=1.0)
    assert isinstance(plan.mass, float)
    static = build_plan("moe-spec", budget=2, **ORDER)
    assert static.order == (2, 0, 1)
    assert len({static, build_plan("moe-spec", budget=2, **ORDER)}) == 1


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        build_plan("xshare").k0 = 2


def test_a_free_plan_is_the_same_plan():
    named, free = build_plan("oea", k0=2, kmax=9), build_plan("custom", k0=2, kmax=9)
    assert free.policy == "custom"
    assert free == SelectionPlan(k0=2, kmax=9)
    assert {key: getattr(named, key) for key in KEYS} == {key: getattr(free, key) for key in KEYS}


@pytest.mark.parametrize(
    ("keys", "ranks", "line"),
    [
        ({"policy": "xshare", "k0": 9}, 1, "k0 = 9: allowed is at most the model's top-k, 8"),
        ({"policy": "xshare", "target_per_rank": 5}, 1, "target_per_rank = 5: allowed only with expert parallelism"),
        ({"policy": "moe-spec", "budget": 2, **ORDER}, 1, "order of 3 experts: allowed is all 64 experts once"),
        ({"policy": "xshare", "k0": 8}, 1, None),
        ({"policy": "xshare", "target_per_rank": 5}, 2, None),
    ],
)
def test_a_plan_is_checked_against_the_model(keys, ranks, line):
    plan = build_plan(keys)
    if line is None:
        plan.check(Router(8), 64, ranks=ranks)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        plan.check(Router(8), 64, ranks=ranks)


@pytest.mark.parametrize("policy", ["xshare", "oea", "lynx-lat:retain=9", "lynx-acc:confidence=0.1", "custom:k0=1"])
def test_own_share_takes_weights_that_renormalize(policy):
    name, keys = parse_policy(policy)
    plan = build_plan(name, **keys, own_share=0.75)
    plan.check(Router(8), 64)
    line = "own_share = 0.75: allowed only with a model that renormalizes its weights"
    with pytest.raises(ValueError, match=f"^{line}$"):
        plan.check(Router(8, renormalize=False), 64)
    build_plan(name, **keys).check(Router(8, renormalize=False), 64)


@pytest.mark.parametrize(
    ("keys", "can_drop"),
    [
        ({"policy": "vanilla"}, False),
        ({"policy": "xshare"}, True),
        ({"policy": "xshare", "add": 62}, True),
        ({"policy": "xshare", "add": 63}, False),
        ({"policy": "xshare", "add": 64}, False),
        ({"policy": "xshare", "k0": 8, "add": 0}, False),
        ({"policy": "xshare", "k0": 8, "p": 0.9, "add": 0}, True),
        ({"policy": "xshare", "add_per_request": 64}, False),
        ({"policy": "xshare", "mass": 0.99}, True),
        ({"policy": "xshare", "mass": 1.0}, False),
        ({"policy": "xshare", "target_per_rank": 64}, False),
        ({"policy": "oea", "k0": 7}, True),
        ({"policy": "oea", "k0": 8}, False),
        ({"policy": "oea", "k0": 7, "kmax": 7}, True),
        ({"policy": "oea", "k0": 8, "max_rank": 7}, False),
        ({"policy": "pruned", "k0": 7}, True),
        ({"policy": "pruned", "k0": 8}, False),
        ({"policy": "lynx-lat", "retain": 63}, True),
        ({"policy": "lynx-lat", "retain": 64}, False),
        ({"policy": "lynx-lat", "drop": 0}, False),
        ({"policy": "lynx-lat", "drop": 1}, True),
        ({"policy": "lynx-acc", "confidence": 0.1}, True),
        ({"policy": "moe-spec", "budget": 64}, False),
        ({"policy": "dynamic-skip", "beta": 0}, False),
        ({"policy": "dynamic-skip", "beta": 0.1}, True),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_plan_knows_whether_it_can_drop_an_expert(keys, can_drop):
    assert build_plan(keys).can_drop(Router(8), 64) is can_drop


@pytest.mark.parametrize(
    ("keys", "nothing"),
    [
        ({"policy": "custom"}, True),
        ({"policy": "custom", "coverage": "own", "beta": 0.3}, True),
        ({"policy": "xshare", "k0": 0, "add": 0}, True),
        ({"policy": "xshare", "k0": 0, "add": 1}, False),
        ({"policy": "xshare", "k0": 1, "add": 0}, False),
        ({"policy": "vanilla"}, False),
        ({"policy": "lynx-lat", "drop": 0}, False),
        ({"policy": "lynx-acc", "confidence": 0.1}, False),
        ({"policy": "moe-spec", "budget": 1}, False),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_plan_knows_whether_it_selects_nothing(keys, nothing):
    assert build_plan(keys).selects_nothing is nothing


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"policy": "vanilla"}, set()),
        ({"policy": "pruned"}, set()),
        ({"policy": "xshare"}, {"uses_selected", "substitutes"}),
        ({"policy": "custom", "k0": None}, {"uses_selected", "substitutes"}),
        ({"policy": "moe-spec", "budget": 4}, {"uses_selected", "substitutes"}),
        (
            {"policy": "moe-spec", "budget": 4, "coverage": "truncate"},
            {"uses_selected", "divides_by_own", "can_rescue"},
        ),
        (
            {"policy": "moe-spec", "budget": 4, "coverage": "truncate", "rescue": False},
            {"uses_selected", "divides_by_own"},
        ),
        ({"policy": "custom", "coverage": "truncate", "k0": 1}, {"uses_selected", "divides_by_own"}),
        ({"policy": "custom", "coverage": "truncate", "k0": None}, {"uses_selected", "divides_by_own"}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_plan_says_what_its_coverage_means(keys, facts):
    plan = build_plan(keys)
    names = {"uses_selected", "substitutes", "divides_by_own", "can_rescue"}
    assert {name for name in names if getattr(plan, name)} == facts


def test_a_target_for_every_rank_can_drop_until_the_ranks_hold_all():
    plan = build_plan("xshare", target_per_rank=8)
    assert plan.can_drop(Router(8), 64, ranks=7)
    assert not plan.can_drop(Router(8), 64, ranks=8)
    # The target includes the warm-up.
    assert build_plan("xshare", k0=4, target_per_rank=30).can_drop(Router(8), 64, ranks=2)


def test_the_package_has_no_other_names():
    assert sglang_xshare.select is not None
    with pytest.raises(AttributeError, match="module 'sglang_xshare' has no attribute 'nope'"):
        sglang_xshare.nope  # noqa: B018
