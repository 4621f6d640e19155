"""Policies as spelt on the command line: every spelling, and one clear line for every misspelling."""

import json
from dataclasses import asdict

import pytest

from benchmark.common.variant import Variant, parse_plan, parse_variant
from sglang_xshare import build_plan


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


def test_a_plan_is_spelt_as_for_the_server():
    assert parse_plan("xshare:k0=2,add=12,utility=full") == build_plan("xshare", k0=2, add=12, utility="full")
    assert parse_plan('oea:{"k0": 3}') == build_plan("oea", k0=3)
    assert parse_plan("off") == parse_plan("vanilla") == build_plan("vanilla")


def test_without_keys_the_published_ones():
    assert parse_plan("xshare") == build_plan("xshare", k0=1, add=24)
    assert parse_plan("xshare", speculative=True) == build_plan("xshare", k0=1, add=0, add_per_request=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shareX", "policy 'shareX': allowed is NAME"),
        ("sharex", "policy = 'sharex': allowed is one of vanilla"),
        ("xshare:k0", "'k0' is no key=value"),
        ("xshare:k0=one", "k0 = 'one': allowed is an integer"),
        ("oea:add=3", "add = 3: oea has no such key"),
    ],
)
def test_a_misspelt_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_plan(text)


def test_it_comes_out_of_a_record_as_it_went_in():
    variant = parse_variant("xshare:k0=1,add=24", ["--tp", "2"])
    assert Variant.read(json.loads(json.dumps(asdict(variant)))) == variant
