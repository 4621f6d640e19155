"""`sglang-xshare policies --show`: the plan in force, and one line for what a server refuses."""

import json

import pytest

from sglang_xshare.cli import main


@pytest.fixture
def show(capsys):
    """Call it with a policy for (exit code, plan, what stderr says)."""

    def run(policy: str) -> tuple[int, dict[str, object], str]:
        code = main(["policies", "--show", policy])
        said = capsys.readouterr()
        return code, json.loads(said.out or "{}"), said.err

    return run


def test_vanilla_has_nothing_to_show(show):
    assert show("vanilla") == (0, {"policy": "vanilla"}, "")


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("xshere", "--expert-policy xshere: policy = 'xshere':"),
        ("xshare:{", "--expert-policy xshare:{: policy 'xshare:{':"),
        ("", "--expert-policy : policy = '':"),
    ],
)
def test_what_a_server_refuses_is_refused_in_one_line(policy, line, show):
    code, plan, said = show(policy)
    assert (code, plan) == (1, {})
    assert len(said.splitlines()) == 1
    assert said.startswith(f"policies: {line}")
