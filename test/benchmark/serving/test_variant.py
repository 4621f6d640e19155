"""Policies as spelt on the command line: every spelling, and one clear line for every misspelling."""

import pytest

from benchmark.common.variant import Variant, parse_variant


@pytest.mark.parametrize(
    ("text", "policy", "keys"),
    [
        ("off", None, {}),
        ("vanilla", "vanilla", {}),
        ("xshare:k0=1,add=24", "xshare", {"k0": 1, "add": 24}),
        ("xshare:p=0.9,balance=fill", "xshare", {"p": 0.9, "balance": "fill"}),
        ("moe-spec:rescue=false", "moe-spec", {"rescue": False}),
        ('moe-spec:{"order": [2, 0, 1]}', "moe-spec", {"order": [2, 0, 1]}),
    ],
)
def test_reads_every_spelling(text, policy, keys):
    assert parse_variant(text) == Variant(text, policy, keys)


@pytest.mark.parametrize(
    "text", ["", "XShare", "xshare:", "xshare:k0", "xshare:=1", "xshare:k0=", "xshare:{k0: 1}", "a b"]
)
def test_refuses_in_one_line_what_it_cannot_read(text):
    with pytest.raises(ValueError, match="allowed is NAME") as refused:
        parse_variant(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_server_flags():
    assert parse_variant("off").server_args() == []
    assert parse_variant("vanilla", ["--tp", "2"]).server_args() == ["--expert-policy", "vanilla", "--tp", "2"]
    flags = parse_variant("xshare:k0=1,add=24").server_args()
    assert flags == ["--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 24}']
