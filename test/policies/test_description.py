"""The plan in force: every default resolved, every override where it applies."""

import json
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from policies.batches import build
from sglang_xshare import build_plan
from sglang_xshare.policies import list_policies
from sglang_xshare.policies.common import COMMON_KEYS
from sglang_xshare.policies.description import describe
from sglang_xshare.policies.plan import SelectionPlan

XSHARE = {
    **{"policy": "xshare", "k0": 1, "p": 1.0, "utility": "topk", "add": 0, "add_per_request": 0},
    **{"mass": 0.93, "max_add": None, "target_per_rank": None, "balance": "literal", "free_residents": None},
    **{"own_share": 0.0, "acceptance": 1.0, "warm_rows": None, "phases": ["decode", "verify"], "min_rows": 2},
    **{"max_rows": None, "rows": "batch", "exact": None},
    "overrides": [{"by_rows": "2-7", "mass": 0.85}, {"by_rows": "8-15", "mass": 0.9}],
}


def test_every_key_has_its_value():
    assert describe(build()) == XSHARE
    assert describe(build(mass=0.5, min_rows=4)) == XSHARE | {"mass": 0.5, "min_rows": 4, "overrides": []}
    smaller = [{"by_rows": "9-15", "mass": 0.85}]
    assert describe(build(mass="fast", min_rows=9)) == XSHARE | {"mass": 0.9, "min_rows": 9, "overrides": smaller}
    assert describe(build(speculative=True)) == XSHARE
    limited = {"phases": ["decode"], "max_rows": 64, "rows": "rank", "exact": {"priority": 10}}
    assert describe(build(**limited)) == XSHARE | limited
    inner = build(add=3, by_rows={"4": {"layers": {"1": {"k0": 2}}}})
    assert describe(inner)["overrides"] == [{"layers": "1", "by_rows": "4", "k0": 2}]


LIMITS = [
    ({"min_rows": 16}, 0.93, []),
    ({"min_rows": 20}, 0.93, []),
    ({"max_rows": 7}, 0.85, []),
    ({"max_rows": 8}, 0.9, [{"by_rows": "2-7", "mass": 0.85}]),
    ({"max_rows": 20}, 0.93, XSHARE["overrides"]),
    ({"max_rows": 7, "by_rows": {"4-7": {"k0": 2}}}, 0.85, [{"by_rows": "4-7", "k0": 2}]),
    ({"min_rows": 16, "by_rows": {"4-17": {"k0": 2}}}, 0.93, [{"by_rows": "4-17", "k0": 2}]),
]


@pytest.mark.parametrize(("keys", "mass", "overrides"), LIMITS)
def test_a_table_is_described_for_the_steps_within_the_limits(keys, mass, overrides):
    described = describe(build(**keys))
    assert (described["mass"], described["overrides"]) == (mass, overrides)


def test_what_stands_for_the_models_top_k_is_a_number_once_the_model_is_known():
    assert describe(build("oea"))["kmax"] is None
    assert describe(build("oea"), top_k=8)["kmax"] == 8
    assert describe(build("custom", k0=None, add=3), top_k=8)["k0"] == 8


@pytest.mark.parametrize("policy", [policy for policy in list_policies() if policy.selects])
def test_every_policy_is_described_with_all_of_its_keys(policy):
    required = {"dynamic-skip": {"beta": 0.1}, "lynx-lat": {"drop": 2}, "lynx-acc": {"confidence": 0.2}}
    required |= {"moe-spec": {"budget": 2, "ranking": "static", "order": [2, 0, 1]}, "custom": {"k0": 1}}
    described = describe(build(policy.name, speculative=True, **required.get(policy.name, {})))
    assert set(described) == {"policy", *policy.keys, *COMMON_KEYS, "overrides"} - {"layers", "by_rows"}
    order = [2, 0, 1] if policy.name == "moe-spec" else None
    assert json.loads(json.dumps(described)).get("order") == order


KEYS = st.fixed_dictionaries(
    {}, optional={"k0": st.integers(1, 2), "add": st.integers(0, 2), "mass": st.sampled_from([0.5, "fast"])}
)
OTHERS = st.sampled_from(
    [*({"policy": name} for name in ("vanilla", "oea", "xshare")), {"policy": "xshare", "mass": 0.25}]
)
LIMITED = st.fixed_dictionaries(
    {}, optional={"min_rows": st.sampled_from([2, 5, 8, 16, 17]), "max_rows": st.sampled_from([7, 8, 10, 17, 20])}
)


def ranges(lowest: int) -> st.SearchStrategy[dict[str, dict[str, Any]]]:
    spans = st.tuples(st.integers(lowest, 6), st.integers(0, 3)).map(lambda span: f"{span[0]}-{span[0] + span[1]}")
    return st.dictionaries(spans, st.one_of(KEYS, OTHERS), max_size=3)


@settings(deadline=None)
@given(KEYS, ranges(0), ranges(2), LIMITED)
def test_read_by_its_rule_it_is_the_schedule(keys, layers, by_rows, limits):
    try:
        schedule = build(**keys, layers=layers, by_rows=by_rows, **limits)
    except ValueError:  # such as a key of xshare on top of oea
        reject()
    described = json.loads(json.dumps(describe(schedule)))
    for layer in range(11):
        for rows in (*range(2, 11), 15, 16, 17, 20, 99):
            if schedule.reason_to_skip("decode", rows) is None:
                assert read(described, layer, rows) == schedule.plan(layer, rows)


def read(described: dict[str, Any], layer: int, rows: int) -> SelectionPlan | None:
    """The plan that a description gives to a layer and a batch size."""
    common = {"phases", "min_rows", "max_rows", "rows", "exact", "overrides"}
    keys = base = {name: value for name, value in described.items() if name not in common}
    for override in described["overrides"]:
        if covers(override.get("layers"), layer) and covers(override.get("by_rows"), rows):
            changed = {name: value for name, value in override.items() if name not in ("layers", "by_rows")}
            keys = changed if "policy" in changed else {**base, **changed}
    return None if keys["policy"] == "vanilla" else build_plan(keys)


def covers(span: str | None, number: int) -> bool:
    if span is None:
        return True
    first, _, last = span.partition("-")
    return int(first) <= number <= int(last or first)
