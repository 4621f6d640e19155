"""`python -m benchmark.evaluation`: its own task, and the flags of its server."""

import pytest

from benchmark.common.paths import TEXTS
from benchmark.evaluation import __main__ as command
from benchmark.evaluation.tasks.sums import load_sums


def test_a_sum_stands_after_a_solved_one():
    rows = load_sums()["test"]
    lines = (TEXTS / "arithmetic.txt").read_text().splitlines()
    assert len(rows) == len(lines) - 1
    for number in (1, 700, len(lines) - 1):
        row = rows[number - 1]
        assert f"{row['question']} {row['answer']}" == f"{lines[number - 1]}\n{lines[number]}"


@pytest.mark.parametrize(
    ("policies", "flags"), [(("off", "oea:k0=3", "xshare"), ["oea:k0=3"]), (("off", "vanilla"), ["observe"])]
)
def test_the_server_starts_with_the_first_policy_that_selects(policies, flags):
    assert command._start_flags(policies) == ["--expert-policy", *flags]
