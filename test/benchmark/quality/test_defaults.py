"""`python -m benchmark.quality.defaults`: budgets by count, share and utility held, on a small random model; with
drafts as `python -m benchmark.quality.defaults --batch 1 2 4 8 16 --tokens-per-request 4`, for less.
"""

import pytest

from benchmark.common.variant import parse_plan
from benchmark.quality import defaults


def test_a_share_is_of_the_models_experts():
    settings = dict(defaults.list_settings(32))
    spelt = {"add=48": "add=32", "add=0.25 of the experts": "add=8", "mass=0.9": "mass=0.9"}
    assert settings.items() >= {name: f"xshare:k0=1,{keys}" for name, keys in spelt.items()}.items()
    by_request = dict(defaults.list_settings(32, verifies=True)).items() - settings.items()
    assert ("add_per_request=4", "xshare:k0=1,add_per_request=4") in by_request


def test_a_policy_by_rows_has_at_each_size_the_setting_of_its_rows():
    """4 requests of 4 tokens are 16 rows, of which the default keeps 93 %, and 2 are 8."""
    masses, start = (0.85, 0.9, 0.93), {"scoring": "softmax", "top_k": 4, "experts": 32, "mixing": "mixed"}
    points = {
        f"{batch} {mass}": start
        | {"batch": batch, "tokens_per_request": 4, "setting": f"mass={mass:g}"}
        | {"loss": {"delta": mass * batch, "error": 0.1}, "vanilla_active": 10.0, "active_experts": 10 * mass}
        for batch in (1, 2, 4)
        for mass in masses
    }
    rows = {row[0]: row[1:] for row in defaults.tabulate_defaults(points).rows}
    assert list(rows) == ["mass=0.85", "mass=0.9", "mass=0.93", "xshare"]
    mean = f"{(0.85 * 1 + 0.9 * 2 + 0.93 * 4) / 3:+.4f}"
    assert rows["xshare"] == ["89%", "+3.7200 ± 0.1000", "softmax, 4 of 32, 4 requests x 4 tokens, mixed", mean]


@pytest.mark.parametrize("batch", defaults.BATCHES)
def test_the_guides_policies_are_settings_of_the_study(batch):
    settings = dict(defaults.list_settings(128))
    found = {policy: settings[defaults.find_setting(policy, {"batch": batch})] for policy in defaults.NAMED}
    for policy, setting in found.items():
        assert parse_plan(policy, batch) == parse_plan(setting)


def test_command_measures_into_a_record(measure):
    text = "--per-domain", "4", "--prompt", "8", "--steps", "4"
    points = measure(defaults.main, "defaults", "--batch", "2", "4", *text)
    assert len(points) == 2 * 2 * 16
    assert all(point["active_experts"] <= point["vanilla_active"] + 1e-6 for point in points.values())
    policies, verified = ("xshare", "xshare:k0=1,mass=0.93"), ("--batch", "4", "--tokens-per-request", "4")
    found = measure(defaults.main, "defaults", *policies, "--skip", "2", *verified, *text)
    assert {point["setting"] for point in found.values()} == {*policies}
    by_rows, given = (found[f"4 requests x 4 tokens, mixed, {name}"] for name in policies)
    assert (by_rows["active_experts"], by_rows["loss"]) == (given["active_experts"], given["loss"]), "of 16 rows"
