"""Tuned settings as one policy: whatever groups and batch sizes, every layer and size gets its own setting."""

from hypothesis import given, settings
from hypothesis import strategies as st

from selection.cases import words
from sglang_xshare.policies import get_policy
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.policies.spelling import parse_policy
from sglang_xshare.tune.plans import VANILLA_SETTING, build_policy, group_layers, join_batches

SETTINGS = words(f"""
{VANILLA_SETTING} xshare:k0=1,add=0 xshare:k0=1,add=8,utility=full xshare:k0=2,mass=0.9 xshare xshare:fast oea:k0=3 oea
""")
LAYERS = range(6)
few = settings(max_examples=40, deadline=None)


def plan_of(setting, rows):
    name, keys = parse_policy(setting)
    return None if name == VANILLA_SETTING else get_policy(name).build(keys, rows)


def schedule_of(policy):
    policy = dict(policy)
    return build_schedule(policy.pop("policy"), policy, speculative=False)


def test_groups_are_runs_of_layers():
    groups = {1: [(0, 1, 2, 3, 4, 5)], 4: [(0,), (1, 2), (3,), (4, 5)], 9: [(0,), (1,), (2,), (3,), (4,), (5,)]}
    assert {most: group_layers(LAYERS, most) for most in groups} == groups


@few
@given(st.dictionaries(st.integers(2, 40), st.lists(st.sampled_from(SETTINGS), min_size=3, max_size=3), min_size=1))
def test_every_layer_and_batch_size_gets_its_setting(choices):
    groups = group_layers(LAYERS, 3)
    plans = {size: dict(zip(groups, chosen, strict=True)) for size, chosen in choices.items()}
    schedule = schedule_of(join_batches(plans))
    if schedule is None:
        assert all(set(chosen) == {VANILLA_SETTING} for chosen in choices.values())
        return
    schedule.plans(LAYERS)
    for rows in range(2, 45):
        size = next((size for size in sorted(plans) if rows <= size), max(plans))
        for group, setting in plans[size].items():
            for layer in group:
                skipped = schedule.reason_to_skip("decode", rows) is not None
                found = None if skipped else schedule.plan(layer, rows)
                assert found == plan_of(setting, rows), (rows, layer)


def test_what_a_person_would_write():
    chosen = {(0, 1): VANILLA_SETTING, (2,): "xshare:k0=1,add=4", (3,): "xshare:k0=1,add=8"}
    layers = {"0-1": {"policy": VANILLA_SETTING}, "3": {"policy": "xshare", "k0": 1, "add": 8}}
    assert build_policy(chosen) == {"policy": "xshare", "k0": 1, "add": 4, "layers": layers}
