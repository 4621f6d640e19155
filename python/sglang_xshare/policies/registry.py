"""Named policies, for the command line and its errors."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .keys import Key, Table, accepts_none, as_json, look_up, shorten, suggest
from .plan import KEYS, SelectionPlan


@dataclass(frozen=True)
class Setting:
    """Keys that a paper or this project recommends, and the `result` with these keys."""

    keys: Mapping[str, Any]
    result: str


@dataclass(frozen=True, eq=False)
class Policy:
    """A named policy: `make` turns keys into a plan. A key without a default in `defaults` is required.

    `bare` are the keys that apply if a user gives none; `presets` are whole sets of keys, by the word that stands for
    each set. `depends` describes defaults that depend on other keys, and `complete` adds such defaults to keys.
    `tables` contain, by key and word, the numbers for which the word stands: one for each range of router rows. The
    policy selects in `phases` unless a user names other phases. A policy with `selects` False leaves every step
    unchanged and has no common keys.
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
        """Return the value of an absent key; the key's declared default if the policy has required keys."""
        try:
            return self.resolve({})[name]
        except ValueError:
            return self.defaults[name]

    @property
    def changes(self) -> list[int]:
        """Return the row counts at which a word of `tables` changes its number, ascending."""
        return sorted(
            {first for words in self.tables.values() for table in words.values() for first in table if first > 1}
        )

    def build(self, keys: Mapping[str, Any], rows: int | None = None) -> SelectionPlan:
        """Return the plan for these keys in a step of `rows` router rows, `PLAIN_ROWS` if `rows` is None.

        Raises ValueError naming the key, the value and what is allowed.
        """
        self.check_names(keys)
        missing = self.list_missing(keys)
        if missing:
            raise ValueError("; ".join(missing))
        values = self._check_values(self.complete(keys))
        return replace(self.make(**self._look_up(values, rows or PLAIN_ROWS)), policy=self.name)

    def check_names(self, keys: Mapping[str, Any], others: Iterable[str] = ()) -> None:
        """Raise ValueError for a key that neither the policy nor `others` contains."""
        known = [*self.keys, *others]
        for name, value in keys.items():
            if name not in known:
                allowed = (", ".join(known) or "none") + suggest(name, known)
                raise ValueError(
                    f"{shorten(name)} = {as_json(value)}: {self.name} has no such key; allowed keys: {allowed}"
                )

    def list_missing(self, keys: Iterable[str]) -> list[str]:
        """Return a clause for each required key that is missing in `keys`."""
        required = {name: key for name, key in self.keys.items() if name not in self.defaults and name not in keys}
        return [f"{name} is missing: {self.name} needs {key.allowed}" for name, key in required.items()]

    def resolve(self, keys: Mapping[str, Any], rows: int | None = None) -> dict[str, Any]:
        """Return every key of the policy with its given or default value; with `rows`, numbers in place of words."""
        plan, given = self.build(keys, rows), self._check_values(self.complete(keys))
        given = given if rows is None else self._look_up(given, rows)
        return {name: given.get(name, getattr(plan, name, self.defaults.get(name))) for name in self.keys}

    def find_tables(self, values: Mapping[str, Any]) -> dict[str, Table]:
        """Return, by key, the table of each value that is a word of `tables`."""
        return {name: table for name, words in self.tables.items() if (table := words.get(values.get(name, "")))}

    def _look_up(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return the values, each word of `tables` replaced by its number for a step of `rows` router rows."""
        return {**values, **{name: look_up(table, rows) for name, table in self.find_tables(values).items()}}

    def _check_values(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.keys[name].check(name, value) for name, value in keys.items()}


PLAIN_ROWS = 8
"""Router rows of the step for which a plan is built, unless the caller gives a number."""
_POLICIES: dict[str, Policy] = {}


def register(
    name: str, paper: str, *, own_keys: Mapping[str, Key] | None = None, summary: str = "", **options: Any
) -> Callable[[Callable[..., SelectionPlan]], Callable[..., SelectionPlan]]:
    """Register a function as policy `name`: its parameters are the keys, its docstring's first line is the summary.

    A parameter accepts the values of its key in `own_keys`, else of the plan's key of the same name, and None if
    annotated so.
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
    """Return the policy called `name`. Raises ValueError listing the names, or the keys of a preset."""
    if isinstance(name, str) and name in _POLICIES:
        return _POLICIES[name]
    base, _, preset = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base in _POLICIES:
        keys = _POLICIES[base].presets.get(preset)
        apart = "" if keys is None else f": {json.dumps({'policy': base, **keys})}"
        raise ValueError(f"policy = {as_json(name)}: must be a name, with its keys beside it{apart}")
    raise ValueError(f"policy = {as_json(name)}: must be one of {', '.join(_POLICIES)}{suggest(name, _POLICIES)}")


def list_policies() -> list[Policy]:
    """Return all policies, in the order of their registration."""
    return list(_POLICIES.values())


def build_plan(policy: str | Mapping[str, Any], **keys: Any) -> SelectionPlan:
    """Return the plan of a named policy: `build_plan("xshare", k0=1)` or `build_plan({"policy": "xshare", "k0": 1})`.

    A key whose number depends on the step's router rows, such as the `mass` of bare `xshare`, has the number of a step
    of `PLAIN_ROWS`.

    Raises ValueError naming the policy or the key, the value and what is allowed.
    """
    if isinstance(policy, Mapping):
        if "policy" not in policy:
            raise ValueError(f'policy = {as_json(dict(policy))}: must be an object with a key "policy"')
        keys = {**policy, **keys}
        policy = keys.pop("policy")
    return get_policy(policy).build(keys)
