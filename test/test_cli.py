"""The command line: what would have no effect is refused in one line."""

from refused import read_refusal
from sglang_xshare.cli import main


def test_a_flag_of_policies_without_effect_is_refused(capsys):
    assert main(["policies", "--speculative-num-draft-tokens", "4"]) == 1
    assert read_refusal(capsys).startswith("policies: --speculative-num-draft-tokens 4: ")


def test_a_policy_of_verification_alone_is_refused_by_the_flags_of_policies(capsys):
    policy = "moe-spec:budget=32"
    assert main(["policies", "--show", policy]) == 1
    line = read_refusal(capsys)
    assert line.startswith(f"policies: --expert-policy {policy}: ")
    assert "--speculative-num-draft-tokens" in line
    assert main(["policies", "--show", policy, "--speculative-num-draft-tokens", "4"]) == 0
