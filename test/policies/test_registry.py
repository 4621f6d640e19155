"""What every policy has in common: names, keys, defaults, phases, and what the table lists."""

import pytest

from refused import read_refusal
from sglang_xshare import Router, build_plan
from sglang_xshare.cli import main
from sglang_xshare.policies import bounds, get_policy, list_policies
from sglang_xshare.policies.common import COMMON_KEYS
from sglang_xshare.policies.plan import KEYS
from sglang_xshare.policies.schedule import build_schedule

CONTRACT = {
    "vanilla": "",
    "pruned": "k0 p",
    "dynamic-skip": "beta",
    "xshare": "k0 p utility add add_per_request mass max_add target_per_rank balance free_residents own_share "
    "acceptance warm_rows",
    "oea": "k0 p kmax max_rank target_per_rank free_residents own_share",
    "lynx-lat": "retain drop own_share",
    "lynx-acc": "confidence max_voters min_votes own_share",
    "moe-spec": "budget ranking utility order coverage rescue scope own_share acceptance",
    "custom": " ".join(KEYS),
    "observe": "plans",
}


def test_the_policies_and_their_keys():
    assert [(policy.name, " ".join(policy.keys)) for policy in list_policies()] == list(CONTRACT.items())


def test_what_papers_recommend_can_be_built():
    settings = [(policy, setting) for policy in list_policies() for setting in policy.published]
    assert len(settings) == 17
    for policy, setting in settings:
        plan = policy.build(setting.keys)
        plan.check(Router(8), 128, ranks=8)
        assert bounds.can_drop(plan, Router(8), 128), (policy.name, setting)
        assert setting.result


def test_listed_defaults_are_the_schedules():
    schedule = build_schedule("oea", {}, speculative=True)
    listed = {name: key.default for name, key in COMMON_KEYS.items()}
    assert (listed["min_rows"], listed["max_rows"]) == (schedule.min_rows, schedule.max_rows)
    assert get_policy("oea").phases == schedule.phases
    assert build_schedule("oea", {"layers": {}, "by_rows": {}}, speculative=True).plans() == schedule.plans()


def test_one_policy_alone_and_an_unknown_one(capsys):
    assert main(["policies", "oea"]) == 0
    words = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert [name for name in CONTRACT if [name] in words] == ["oea"]
    assert main(["policies", "nope"]) == 1
    assert read_refusal(capsys).startswith("policies: policy = 'nope': ")


def test_a_default_that_depends_on_other_keys_is_listed_so(capsys):
    assert main(["policies", "xshare"]) == 0
    table = capsys.readouterr().out
    assert " ".join(table.split()).count("default; none beside add,") == 1
    assert "xshare:careful is xshare:k0=1,mass=careful" in table
    assert "mass=default is 0.85 up to 7 rows, 0.9 up to 15, 0.93 from 16 on" in table
    for other, value in {"add": 0, "add_per_request": 4, "target_per_rank": 5}.items():
        assert other in get_policy("xshare").depends["mass"]
        assert get_policy("xshare").resolve({other: value})["mass"] is None
    resolve = get_policy("xshare").resolve
    assert [resolve({"k0": 2, "p": 0.9}, rows)["mass"] for rows in (None, 4, 16)] == ["default", 0.85, 0.93]
    assert [resolve({"mass": "fast"}, rows)["mass"] for rows in (None, 4, 16)] == ["fast", 0.8, 0.9]


@pytest.mark.parametrize(
    ("policy", "keys", "message"),
    [
        ("xshere", {}, "did you mean xshare\\?$"),
        ("OEA", {}, "did you mean oea\\?$"),
        ("moespec", {}, "did you mean moe-spec\\?$"),
        ("nothing", {}, "custom, observe$"),
        ("xshare", {"ad": 3}, "warm_rows; did you mean add\\?$"),
        ("xshare", {"nope": 3}, "warm_rows$"),
    ],
)
def test_near_misses_are_answered_with_the_nearest_name(policy, keys, message):
    with pytest.raises(ValueError, match=message):
        build_plan(policy, **keys)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nope"], "sglang-xshare: COMMAND: invalid choice: 'nope'"),
        (["policies", "--nope"], "policies: unrecognized arguments: --nope"),
        (["policies", "--shaw"], "policies: unrecognized arguments: --shaw; did you mean --show?"),
        (["policies", "--nope", "xshare", "--show", "oea"], "policies: unrecognized arguments: --nope"),
        (["--nope", "policies"], "sglang-xshare: unrecognized arguments: --nope"),
        (["policy", "set"], "policy set: the following arguments are required: URL"),
        (["tune", "--tolerance", "-3%"], "tune: --tolerance -3%:"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, line, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 1
    assert read_refusal(capsys).startswith(line)
