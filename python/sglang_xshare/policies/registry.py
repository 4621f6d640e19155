"""Named policies: what the command line offers, and what its errors list."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .keys import Key, Table, accepts_none, as_json, look_up, shorten, suggest
from .plan import KEYS, SelectionPlan


@dataclass(frozen=True)
class Setting:
    """Keys that a paper recommends, or this project where `result` says so, and what was found with them."""

    keys: Mapping[str, Any]
    result: str


@dataclass(frozen=True, eq=False)
class Policy:
    """A preset: `make` turns its keys into a plan. A key without a default in `defaults` is required.

    A user who gives no key gets `bare`; `presets` are keys by a word that is given in their place. `depends` says of a
    default that depends on other keys what else it can be, and `complete` adds such defaults to keys. `tables` has, by
    key and word, the numbers that a word stands for in steps of different sizes. It selects in `phases` unless a user
    names others; one that does not select leaves every step as it is and has no common keys.
    """

    name: str
    paper: str
    summary: str
    make: Callable[..., SelectionPlan]
    keys: Mapping[str, Key]
    defaults: Mapping[str, Any]
    published: tuple[Setting, ...] = ()
    bare: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    depends: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    tables: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)
    phases: tuple[str, ...] = ("decode", "verify")
    selects: bool = True

    def default(self, name: str) -> Any:
        """What a key comes to where none is given; as it is declared of a policy that cannot do without."""
        try:
            return self.resolve({})[name]
        except ValueError:
            return self.defaults[name]

    @property
    def changes(self) -> list[int]:
        """The router rows from which some word of a table stands for another number, ascending."""
        return sorted(
            {first for words in self.tables.values() for table in words.values() for first in table if first > 1}
        )

    def build(self, keys: Mapping[str, Any], rows: int | None = None) -> SelectionPlan:
        """Return the plan for these keys in a step of `rows` router rows; without them, in a step of `PLAIN_ROWS`.

        Raises ValueError naming the key, the value and what is allowed.
        """
        self.check_names(keys)
        missing = self.list_missing(keys)
        if missing:
            raise ValueError("; ".join(missing))
        values = self._check_values(self.complete(keys))
        return replace(self.make(**self._look_up(values, rows or PLAIN_ROWS)), policy=self.name)

    def check_names(self, keys: Mapping[str, Any], others: Iterable[str] = ()) -> None:
        """Raise ValueError for a key that is neither the policy's nor one of `others`."""
        known = [*self.keys, *others]
        for name, value in keys.items():
            if name not in known:
                allowed = (", ".join(known) or "none") + suggest(name, known)
                raise ValueError(
                    f"{shorten(name)} = {as_json(value)}: {self.name} has no such key; allowed is {allowed}"
                )

    def list_missing(self, keys: Iterable[str]) -> list[str]:
        """What is missing of the keys that have no default, a clause each."""
        required = {name: key for name, key in self.keys.items() if name not in self.defaults and name not in keys}
        return [f"{name} is missing: {self.name} needs {key.allowed}" for name, key in required.items()]

    def resolve(self, keys: Mapping[str, Any], rows: int | None = None) -> dict[str, Any]:
        """Return every key of the policy with its value: as given, or what its default comes to. A word of a table is
        replaced by its number in a step of `rows` router rows, if these are given.
        """
        plan, given = self.build(keys, rows), self._check_values(self.complete(keys))
        given = given if rows is None else self._look_up(given, rows)
        return {name: given.get(name, getattr(plan, name, self.defaults.get(name))) for name in self.keys}

    def find_tables(self, values: Mapping[str, Any]) -> dict[str, Table]:
        """Return, by key, the tables that words among these values stand for."""
        found = {name: self.tables.get(name, {}).get(value) for name, value in values.items() if isinstance(value, str)}
        return {name: table for name, table in found.items() if table}

    def _look_up(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return the values with the numbers that words of a table stand for in a step of `rows` router rows."""
        return {**values, **{name: look_up(table, rows) for name, table in self.find_tables(values).items()}}

    def _check_values(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.keys[name].check(name, value) for name, value in keys.items()}


PLAIN_ROWS = 8
"""Router rows of the step that a plan is for, where nobody says of how many."""
_POLICIES: dict[str, Policy] = {}


def register(
    name: str, paper: str, *, own_keys: Mapping[str, Key] | None = None, summary: str = "", **options: Any
) -> Callable[[Callable[..., SelectionPlan]], Callable[..., SelectionPlan]]:
    """Register a function as policy `name`: its parameters are the policy's keys, with their defaults, and the first
    line of its docstring the summary. A parameter accepts what the plan's key of its name does, or `own_keys` says, and
    None where annotated so.
    """

    def add(make: Callable[..., SelectionPlan]) -> Callable[..., SelectionPlan]:
        known = {**KEYS, **(own_keys or {})}
        signature = inspect.signature(make, eval_str=True)
        parameters = {key: p for key, p in signature.parameters.items() if key in known}
        defaults = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}
        keys = {key: replace(known[key], optional=accepts_none(p.annotation)) for key, p in parameters.items()}
        text = summary or (make.__doc__ or "").split("\n")[0]
        _POLICIES[name] = Policy(name, paper, text, make=make, keys=keys, defaults=defaults, **options)
        return make

    return add


def get_policy(name: Any) -> Policy:
    """Return the policy called `name`. Raises ValueError listing the names; for a preset, which is a word of command
    lines, with its keys.
    """
    if isinstance(name, str) and name in _POLICIES:
        return _POLICIES[name]
    base, _, preset = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base in _POLICIES:
        keys = _POLICIES[base].presets.get(preset)
        apart = "" if keys is None else f": {json.dumps({'policy': base, **keys})}"
        raise ValueError(f"policy = {as_json(name)}: must be a name, with its keys beside it{apart}")
    raise ValueError(f"policy = {as_json(name)}: allowed is one of {', '.join(_POLICIES)}{suggest(name, _POLICIES)}")


def list_policies() -> list[Policy]:
    """All policies, in the order of their registration."""
    return list(_POLICIES.values())


def build_plan(policy: str | Mapping[str, Any], **keys: Any) -> SelectionPlan:
    """Return the plan of a named policy: `build_plan("xshare", k0=1)` or `build_plan({"policy": "xshare", "k0": 1})`.

    A key whose number follows the step's router rows, as the `mass` of bare `xshare`, has that of `PLAIN_ROWS`.

    Raises ValueError naming the policy or the key, the value and what is allowed.
    """
    if isinstance(policy, Mapping):
        if "policy" not in policy:
            raise ValueError(f'policy = {as_json(dict(policy))}: allowed is an object with a key "policy"')
        keys = {**policy, **keys}
        policy = keys.pop("policy")
    return get_policy(policy).build(keys)
