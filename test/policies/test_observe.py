"""`observe`: it leaves every step as it is, and compares policies that are validated as a server's own."""

import pytest

from sglang_xshare import build_plan
from sglang_xshare.policies import VANILLA
from sglang_xshare.policies.description import describe
from sglang_xshare.policies.schedule import build_schedule

XSHARE, OEA = "xshare:k0=1,add=4,min_rows=4", {"policy": "oea", "k0": 3, "layers": {"1": {"policy": "vanilla"}}}
SPELT = 'oea:k0=3,layers={"1": {"policy": "vanilla"}}'


def test_without_keys_it_compares_the_defaults_of_two_policies():
    assert list(build_schedule("observe", {}, speculative=False).observed) == ["xshare", "oea"]
    plans = build_schedule("observe", {}, speculative=True).plans_for(0, "verify", 8)
    assert plans == [build_plan("xshare"), build_plan("oea")]
    shares = [build_schedule("observe", {}, speculative=False).plans_for(0, "decode", rows)[0] for rows in (7, 16)]
    assert shares == [build_plan("xshare", mass=0.85), build_plan("xshare", mass=0.93)]


def test_every_plan_applies_where_a_server_of_its_own_would_apply_it():
    schedule = build_schedule("observe", {"plans": [XSHARE, OEA]}, speculative=False)
    xshare, oea = build_plan("xshare", k0=1, add=4), build_plan("oea", k0=3)
    assert list(schedule.observed) == [XSHARE, SPELT]
    assert schedule.plans_for(0, "decode", 4) == [xshare, oea]
    assert schedule.plans_for(0, "decode", 3) == [VANILLA, oea]
    assert schedule.plans_for(1, "decode", 4) == [xshare, VANILLA]
    assert set(schedule.plans(range(2))) == {xshare, oea}
    assert [schedule.reason_to_skip(phase, rows) for phase in ("decode", "verify") for rows in (1, 512)] == [None] * 4


def test_it_compares_up_to_64_policies():
    assert len(build_schedule("observe", {"plans": [f"xshare:add={add}" for add in range(64)]}, False).observed) == 64


def test_it_is_described_by_its_plans():
    schedule = build_schedule("observe", {"plans": [XSHARE]}, speculative=False)
    alone = build_schedule("xshare", {"k0": 1, "add": 4, "min_rows": 4}, speculative=False)
    assert describe(schedule, 8) == {"policy": "observe", "plans": {XSHARE: describe(alone, 8)}}


def test_a_plan_has_one_name_however_it_is_typed():
    """It is a label on /metrics, and a key in the trace."""
    for plan in ("xshare:k0= 1,add=4\n,", 'xshare:{"k0":1,"add":4}', {"policy": "xshare", "k0": 1, "add": 4}):
        schedule = build_schedule("observe", {"plans": [plan]}, speculative=False)
        assert (list(schedule.observed), schedule.given["plans"]) == (["xshare:k0=1,add=4"], [plan])


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"plans": []}, r"^plans = \[\]: "),
        ({"plans": "xshare"}, r"^plans = 'xshare': "),
        ({"plan": ["xshare"]}, r'^plan = \["xshare"\]: '),
        ({"min_rows": 4}, r"^min_rows = 4: "),
        ({"plans": ["xshere"]}, r"^plans: xshere: policy = 'xshere': "),
        ({"plans": ["xshare:ad=3"]}, r"^plans: xshare:ad=3: ad = 3: "),
        ({"plans": ["vanilla"]}, r"^plans: vanilla: "),
        ({"plans": ["observe"]}, r"^plans: observe: "),
        ({"plans": ["oea", "oea"]}, r"^plans: oea: "),
        ({"plans": ["oea:k0=3", 'oea:{"k0":3}']}, r'^plans: oea:\{"k0":3\}: must be .* given once$'),
        ({"plans": ["oea:k0=3", {"policy": "oea", "k0": 3}]}, r"^plans: .* given once$"),
        ({"plans": [f"xshare:add={add}" for add in range(65)]}, r"^plans: must be at most 64 policies \(got 65\)$"),
        ({"plans": [{"k0": 3}]}, r'^plans: \{"k0": 3\}: '),
        ({"plans": [3]}, r"^plans: 3: "),
        ({"plans": ["moe-spec:budget=8"]}, r"^plans: moe-spec:budget=8: "),
    ],
)
def test_bad_plans_are_named(config, error):
    with pytest.raises(ValueError, match=error):
        build_schedule("observe", config, speculative=False)


def test_it_is_no_override():
    for key in ("layers", "by_rows"):
        with pytest.raises(ValueError, match=f"^{key} '2': observe: "):
            build_schedule("xshare", {key: {"2": {"policy": "observe"}}}, speculative=False)
