"""The allowed values of the keys of plans and policies. The functions here read and write keys as JSON."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, get_args

import orjson

LONGEST = 200
"""The largest number of characters of a value in an error. A value in a request may have megabytes."""
MOST = 2**31 - 1
"""The largest integer allowed as a value. The kernels read int32, and an integer in SGLang's messages has at most 64
bits.
"""
DEEPEST = 32
"""The largest number of nested levels in a JSON value. A policy needs at most eight levels. Without this limit, a value
that is nested deeper than Python's own limit would cause a traceback.
"""


@dataclass(frozen=True)
class Key:
    """The accepted values of one key.

    `kind` is the type of the value. A str must be one of `choices`. A tuple must contain all expert ids, in any order.
    A list must not be empty. A number must be from `low` to `high`. If `above_low` is True, `low` itself is not
    accepted. If a key of numbers has `choices`, it accepts these words too.

    If `optional` is True, the key accepts None. `words` describes the accepted values; if it is empty, the description
    follows from `kind`. `default` is the value of a common key that the user does not set.
    """

    kind: type
    help: str
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    choices: tuple[str, ...] = ()
    optional: bool = False
    words: str = ""
    default: Any = None

    @property
    def allowed(self) -> str:
        """Return a description of the accepted values."""
        if self.words:
            return self.words
        if self.kind is str:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind is int:
            return f"an integer of at least {self.low:g}"
        words = "".join(f", or {word!r}" for word in self.choices)
        return f"a number in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]{words}"

    def check(self, name: str, value: Any) -> Any:
        """Check a value and return it in the key's type. For example, an int may become a float.

        Raises ValueError if the value is not accepted. The check is strict: True, "3" and 3.0 are not integers, and NaN
        is not a number.
        """
        if value is None and self.optional:
            return None
        if not self._accepts(value):
            raise ValueError(f"{name} = {as_json(value)}: must be {self.allowed}")
        if type(value) is int and value > MOST:
            raise ValueError(f"{name} = {as_json(value)}: must be at most {MOST}")
        return value if isinstance(value, str) else self.kind(value)

    def _accepts(self, value: Any) -> bool:
        if self.kind is tuple:
            is_list = isinstance(value, list | tuple) and all(type(i) is int for i in value)
            return is_list and sorted(value) == list(range(len(value))) != []
        if self.kind is list:
            return isinstance(value, list | tuple) and len(value) > 0
        if isinstance(value, str) or self.kind is str:
            return isinstance(value, str) and value in self.choices
        is_number = type(value) in ((int, float) if self.kind is float else (self.kind,))
        return is_number and self.low <= value <= self.high and not (self.above_low and value == self.low)


Table = Mapping[int, float]
"""One number for each range of router rows. The key is the first row count of the range; keys ascend from 1."""


def look_up(table: Table, rows: int) -> float:
    """Return the table's number for a step of `rows` router rows."""
    return table[max(first for first in table if first <= rows)]


def spell_table(table: Table, unit: str = "") -> str:
    """Return the text of a table, such as "0.85 up to 7 rows, 0.9 up to 15, 0.93 from 16 on"."""
    starts = list(table)
    ends = [f"{table[first]:g}{unit} up to {following - 1}" for first, following in pairwise(starts)]
    return ", ".join([f"{ends[0]} rows", *ends[1:], f"{table[starts[-1]]:g}{unit} from {starts[-1]} on"])


def as_json(value: Any) -> str:
    """Return the text of a value for an error line, cut to `LONGEST` characters.

    The text is JSON, except that a string is in single quotes.
    """
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    except RecursionError:
        text = f"a deeply nested {json_type(value)}"
    return shorten(text)


def shorten(text: str) -> str:
    """Return `text`, cut to `LONGEST` characters. A cut text ends with the number of characters of the whole text."""
    if len(text) <= LONGEST:
        return text
    end = f"... ({len(text):,} characters)"
    return text[: LONGEST - len(end)] + end


def check_depth(value: Any) -> None:
    """Raise ValueError for a JSON value that is nested deeper than `DEEPEST` levels."""
    levels = [value]
    for _ in range(DEEPEST + 1):
        parts = [one.values() if isinstance(one, dict) else one for one in levels if isinstance(one, dict | list)]
        levels = [inner for part in parts for inner in part]
        if not parts:
            return
    raise ValueError(f"JSON must be nested at most {DEEPEST} levels deep (got more)")


def json_type(value: Any) -> str:
    """Return JSON's name for the type of a value."""
    names = {NoneType: "null", bool: "boolean", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "number")


def accepts_none(hint: Any) -> bool:
    """Return whether an evaluated type hint accepts None."""
    return NoneType in get_args(hint)


def suggest(word: object, known: Iterable[str]) -> str:
    """Return a text that suggests the known word most similar to an unknown word.

    Errors end with this text. It is "" if no known word is similar.
    """
    if len(str(word)) > LONGEST:
        return ""  # comparing a long word would delay the scheduler
    near = difflib.get_close_matches(str(word).lower(), list(known), n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != word else ""


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the keys and values of a JSON object. Raises ValueError for any other text and for a repeated key."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"JSON must be one object (malformed: {error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"JSON must be one object (got {json_type(found)})")
    check_depth(found)
    json.loads(text, object_pairs_hook=collect)  # raises an error for a repeated key, which orjson accepts
    return found


def override_keys(keys: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a policy after `others` have replaced some of them.

    The budgets `add`, `add_per_request` and `target_per_rank` count experts. If `others` contains `mass`, they are
    removed. If `others` contains one of them, `mass` is removed. Otherwise both kinds of budget would apply, and the
    larger one would win. `balance` is removed together with `target_per_rank`, and `max_add` is removed together with
    `mass`.
    """
    counts = ("add", "add_per_request", "target_per_rank")
    has_count = others.get("add") is not None or any(others.get(name) for name in counts)
    ended = counts if others.get("mass") else ("mass", "max_add") if has_count else ()
    merged = {**{name: value for name, value in keys.items() if name not in ended}, **others}
    if "balance" not in others and not merged.get("target_per_rank"):
        merged.pop("balance", None)
    if "max_add" not in others and merged.get("mass", ...) is None:
        merged.pop("max_add", None)
    return merged


def collect(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError if a key is given twice."""
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"{shorten(key)} must be given once (got it twice)")
        keys[key] = value
    return keys
