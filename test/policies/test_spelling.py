"""Policies as a command line spells them: every spelling, and one clear line for every misspelling."""

import re

import pytest

from sglang_xshare.policies.spelling import parse_policy, spell_policy


@pytest.mark.parametrize(
    ("text", "name", "keys"),
    [
        ("off", "off", {}),
        ("vanilla", "vanilla", {}),
        ("xshare:k0=1,add=24", "xshare", {"k0": 1, "add": 24}),
        ("xshare:p=0.9,balance=fill", "xshare", {"p": 0.9, "balance": "fill"}),
        ("moe-spec:rescue=false", "moe-spec", {"rescue": False}),
        ('moe-spec:{"order": [2, 0, 1]}', "moe-spec", {"order": [2, 0, 1]}),
    ],
)
def test_reads_and_writes_every_spelling(text, name, keys):
    assert parse_policy(text) == (name, keys)
    assert spell_policy(name, keys) == text


def test_a_preset_stands_for_its_keys_before_others():
    assert parse_policy("xshare:careful") == ("xshare", {"k0": 1, "mass": "careful"})
    assert parse_policy("xshare:fast,min_rows=4") == ("xshare", {"k0": 1, "mass": "fast", "min_rows": 4})
    assert parse_policy("xshare:fast,k0=2,mass=0.7") == ("xshare", {"k0": 2, "mass": 0.7})
    assert parse_policy("xshare:fast,add=6") == ("xshare", {"k0": 1, "add": 6})


@pytest.mark.parametrize("value", ["a,b", "1", "{", "", None, [1, 2], {"2-3": {"k0": 1}}])
def test_what_is_written_is_read_as_it_was(value):
    for keys in ({"key": value}, {"k0": 1, "key": value, "add": 0.5}):
        assert parse_policy(spell_policy("xshare", keys)) == ("xshare", keys)


UNREADABLE = ("", "XShare", "xshare:", "xshare:k0", "xshare:=1", "xshare:k0=", "xshare:{k0: 1}", "a b")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *((text, "") for text in UNREADABLE),
        ("xshare:carefull", "'carefull' must be key=value, or careful, or fast; "),
        ("xshare:min_rows=4,fast", "'fast' is a preset, which must stand first and alone; "),
        ("oea:fast", "'fast' must be key=value; "),
    ],
)
def test_refuses_in_one_line_what_it_cannot_read(text, error):
    with pytest.raises(ValueError, match=f"^{re.escape(f'policy {text!r}: {error}')}.*$"):
        parse_policy(text)
