"""A wrong plan is one clear line, and a plan knows what it can do."""

import math
from dataclasses import replace
from typing import Any

import pytest

from refused import refused
from selection.cases import spell
from sglang_xshare import Router, SelectionPlan, build_plan
from sglang_xshare.policies import bounds
from sglang_xshare.policies.plan import KEYS

STATIC = {"budget": 2, "ranking": "static"}
ORDER = {"ranking": "static", "order": [2, 0, 1]}


WRONG: dict[str, list[dict[str, Any]]] = {
    # Types and ranges: a line of each kind, and what presets narrow. `test_every_key_has_its_type_and_range` has all.
    # Names; keys that are missing, or that rule each other out.
    "xshare": [
        *({"k0": True}, {"k0": None}, {"mass": math.nan}, {"utility": 1}, {"own_share": -0.1}, {"acceptance": "on"}),
        *({"balance": "fill"}, {"balance": "level"}, {"add": 3, "max_add": 4}),
    ],
    "oea": [{"k0": 0}, {"k0": 1, "add": 2}, {"k0": 3, "kmax": 2}],
    "pruned": [{"k0": 0}],
    "lynx-lat": [{"retain": 0}, {}, {"retain": 8, "drop": 8}],
    "lynx-acc": [{"min_votes": 2}],
    "dynamic-skip": [{}],
    "vanilla": [{"k0": 1}],
    "nope": [{}],
    "moe-spec": [
        *({"budget": 8, "coverage": "truncate", "rescue": 1}, {**STATIC, "order": "012"}),
        *({"budget": 8, "ranking": "votes"}, {"budget": 8, "coverage": "own"}, {}, {"budget": 2, "ranking": "static"}),
        *({"budget": 2, "order": [1, 0]}, {"budget": 2, "utility": "squared", **ORDER}, {"budget": 2, "rescue": False}),
        *({"budget": 2, "acceptance": 0.5, **ORDER}, {"budget": 2, "coverage": "truncate", "own_share": 0.5}),
    ],
    "custom": [
        *({"policy_": 1}, {"k0": 1, "max_add": 4}, {"budget": 2, "add": 1}, {"confidence": 0.5, "mass": 0.5}),
        *({"budget": 2, "drop": 1, "ranking": "votes"}, {"drop": 1}, {"drop": 1, "ranking": "votes", "add": 1}),
        *({"ranking": "votes"}, {"scope": "request"}, {"coverage": "own", "add": 1}, {"k0": 1, "max_voters": 4}),
        *({"k0": 1, "min_votes": 4}, {"beta": 0.5}, {"coverage": "own", "kmax": 4}),
        *({"coverage": "truncate", "max_rank": 4}, {"k0": 1, "acceptance": "auto"}, {"add": 1, "warm_rows": 1}),
        *({"budget": 2, "ranking": "votes", "acceptance": 0.5}, {"budget": 2, "free_residents": True}),
        *({"coverage": "own", "k0": 1, "warm_rows": 1}, {"coverage": "own", "k0": 1, "rescue": False}),
    ],
}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {"{'k0': 1} {}": ({"k0": 1}, {})}
REFUSED |= {f"{policy} {keys}": (policy, keys) for policy, wrong in WRONG.items() for keys in wrong}


def refuse(case: str, *_: Any) -> None:
    policy, keys = REFUSED[case]
    build_plan(policy, **keys)


COUNTS = {"k0": 0, "add": 0, "add_per_request": 0, "drop": 0}
COUNTS |= dict.fromkeys(("target_per_rank", "budget", "max_voters", "min_votes", "kmax", "max_rank", "warm_rows"), 1)
COUNTS |= {"max_add": 1}
"""The least that they may be."""
Values = tuple[Any, ...]
ALLOWED: dict[str, tuple[Values, Values]] = {  # values that a key takes, and does not; none is converted
    **{name: ((least, 2**31 - 1), (least - 1, 2**31, True, "3", 3.0, [3])) for name, least in COUNTS.items()},
    **{name: ((0.01, 1), (0, 1.01, "0.5", True, math.nan, math.inf, [0.5])) for name in ("p", "mass", "confidence")},
    "acceptance": ((0.01, 1, "auto"), (0, 1.01, "0.5", "Auto", True, math.nan, [0.5])),
    **{name: ((0, 1), (-0.01, 1.01, "0.5", True, math.nan, [0.5])) for name in ("beta", "own_share")},
    **{name: ((True, False), (1, "true", [])) for name in ("rescue", "free_residents")},
    "utility": (("topk", "full", "squared"), ("even", 1, None)),
    "balance": (("literal", "fill", "level"), ("even", 1, None)),
    "ranking": (("router", "votes", "static"), ("even", 1, None)),
    "scope": (("batch", "request"), ("even", 1, None)),
    "coverage": (("substitute", "truncate", "own"), ("even", 1, None)),
    "order": (([2, 0, 1],), ([], [0, 0, 1], [1, 2, 3], [0, 1, True], [0, 1.0], [0, [1]], "012")),
}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_its_type_and_range(name):
    fitting, wrong = ALLOWED[name]
    for value in fitting:
        assert KEYS[name].check(name, value) == (tuple(value) if isinstance(value, list) else value)
    for value in wrong + (() if KEYS[name].optional else (None,)):
        with pytest.raises(ValueError, match=f"^{name} = "):
            build_plan("custom", **{name: value})


def test_a_keyword_replaces_a_key_of_the_object():
    for given in ({"add": 4}, {"k0": 1, "add": 4}):
        assert build_plan({"policy": "xshare", **given}, k0=2) == build_plan("xshare", k0=2, add=4)


def test_numbers_take_their_normal_form():
    """So that equal plans are equal, and an order from JSON can be hashed."""
    plan = build_plan("xshare", mass=1)
    assert plan == build_plan("xshare", mass=1.0)
    assert isinstance(plan.mass, float)
    static = build_plan("moe-spec", budget=2, **ORDER)
    assert static.order == (2, 0, 1)
    assert len({static, build_plan("moe-spec", budget=2, **ORDER)}) == 1


def test_a_free_plan_is_the_same_plan():
    named, free = build_plan("oea", k0=2, kmax=9), build_plan("custom", k0=2, kmax=9)
    assert (named.policy, free.policy, free) == ("oea", "custom", SelectionPlan(k0=2, kmax=9))
    assert {key: getattr(named, key) for key in KEYS} == {key: getattr(free, key) for key in KEYS}


def test_a_plan_is_checked_against_the_model():
    for text, ranks, line in (("xshare:k0=9", 1, "k0 = 9"), ("xshare:target_per_rank=5", 1, "target_per_rank = 5")):
        with refused(line):
            spell(text).check(Router(8), 64, ranks=ranks)
    with refused("order of 3 experts"):
        build_plan("moe-spec", budget=2, **ORDER).check(Router(8), 64)
    spell("xshare:k0=8").check(Router(8), 64)
    spell("xshare:target_per_rank=5").check(Router(8), 64, ranks=2)


@pytest.mark.parametrize("policy", ["xshare", "oea", "lynx-lat:retain=9", "lynx-acc:confidence=0.1", "custom:k0=1"])
def test_own_share_takes_weights_that_renormalize(policy):
    plan, plain = replace(spell(policy), own_share=0.75), Router(8, renormalize=False)
    plan.check(Router(8), 64)
    spell(policy).check(plain, 64)
    with refused("own_share = 0.75"):
        plan.check(plain, 64)


def test_a_target_for_every_rank_can_drop_until_the_ranks_hold_all():
    plan = build_plan("xshare", target_per_rank=8)
    assert bounds.can_drop(plan, Router(8), 64, ranks=7)
    assert not bounds.can_drop(plan, Router(8), 64, ranks=8)
    # The target includes the warm-up.
    assert bounds.can_drop(build_plan("xshare", k0=4, target_per_rank=30), Router(8), 64, ranks=2)
