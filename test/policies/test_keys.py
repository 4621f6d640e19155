"""Values in errors and in JSON: what a request may hold, and how much of it an error repeats."""

import json
from contextlib import nullcontext
from typing import Any

import pytest

from sglang_xshare.policies.keys import DEEPEST, LONGEST, as_json, check_depth, read_object, suggest
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.policies.spelling import parse_policy

LONG = "x" * 3_000_000
LINE = 1_000
"""Characters that an error has at most: one value or two, and what is allowed."""


def nest(levels):
    """Lists in lists, so many levels."""
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_value_is_repeated_as_json_up_to_its_limit():
    assert (as_json("xshare"), as_json({"k0": [1, None]})) == ("'xshare'", '{"k0": [1, null]}')
    assert as_json("x" * (LONGEST - 2)) == repr("x" * (LONGEST - 2))
    shown = as_json(LONG)
    assert len(shown) == LONGEST
    assert shown.endswith("... (3,000,002 characters)")
    assert as_json(nest(100_000)) == "a deeply nested list"


@pytest.mark.parametrize("levels", [1, DEEPEST, DEEPEST + 1, 500])
def test_json_has_a_limit_of_levels(levels):
    for value in (nest(levels), json.loads('{"a":' * (levels - 1) + "{}" + "}" * (levels - 1))):
        deep = pytest.raises(ValueError, match="JSON must be nested at most 32 levels deep")
        with deep if levels > DEEPEST else nullcontext():
            check_depth(value)


@pytest.mark.parametrize("levels", [40, 500, 5_000, 100_000])
@pytest.mark.parametrize("read", [parse_policy, read_object])
@pytest.mark.parametrize("text", ['{{"policy": "xshare", "by_rows": {}}}', "xshare:k0={}", 'xshare:{{"k0": {}}}'])
def test_deep_json_is_one_short_line_wherever_it_is_given(text, levels, read):
    with pytest.raises(ValueError, match="must be") as raised:
        read(text.format("[" * levels + "]" * levels))
    assert len(str(raised.value)) < LINE


LONG_IN: dict[str, list[dict[str, Any]]] = {
    "vanilla": [{LONG: 1}],
    "xshare": [
        *({LONG: 1}, {"k0": LONG}, {"utility": [LONG]}, {"phases": LONG}, {"min_rows": LONG}, {"exact": LONG}),
        *({"exact": {LONG: 1}}, {"layers": LONG}, {"layers": {LONG: {}}}, {"layers": {"0": LONG}}),
        *({"by_rows": {"1": {name: value}}} for name, value in (("layers", {LONG: {}}), (LONG, 1), ("policy", LONG))),
    ],
    "observe": [
        *({LONG: 1}, {"plans": LONG}),
        *({"plans": [plan]} for plan in (LONG, f"xshare:{LONG}", f"xshare:{LONG}=1", {"policy": LONG})),
        {"plans": [{"policy": "xshare", "exact": {LONG: 1}}]},
    ],
}


@pytest.mark.parametrize(
    ("name", "keys"),
    [(LONG, {}), ({"xshare": LONG}, {}), *((name, keys) for name, wrong in LONG_IN.items() for keys in wrong)],
    ids=lambda value: json.dumps(value).replace(LONG, "...")[:60],
)
def test_an_error_repeats_no_long_value(name, keys):
    with pytest.raises(ValueError, match=r"must|no such key|no keys") as raised:
        build_schedule(name, keys, speculative=False)
    line = str(raised.value)
    assert "\n" not in line
    assert len(line) < LINE


def test_what_is_given_twice_is_named_up_to_the_limit():
    with pytest.raises(ValueError, match="must be given once") as raised:
        read_object(f'{{"{LONG}": 1, "{LONG}": 2}}')
    assert len(str(raised.value)) < LINE


def test_a_long_word_is_compared_with_nothing():
    assert (suggest("xshar", ["xshare"]), suggest(LONG, ["xshare"])) == ("; did you mean xshare?", "")
