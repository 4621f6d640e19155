"""The registry of named policies, which the command line and its errors use."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .keys import Key, Table, accepts_none, as_json, look_up, shorten, suggest
from .plan import KEYS, SelectionPlan


@dataclass(frozen=True)
class Setting:
    """Keys that a paper or this project recommends. `result` describes what was measured with these keys."""

    keys: Mapping[str, Any]
    result: str


@dataclass(frozen=True, eq=False)
class Policy:
    """A named policy, which makes a plan from keys.

    * `make` is the function that returns the plan. `keys` are its parameters. A key without an entry in `defaults` is
      required.
    * `bare` contains the keys that apply if a user gives no keys.
    * `presets` contains named sets of keys.
    * `depends` describes the defaults that depend on other keys. `complete` adds these defaults to a user's keys.
    * `tables` contains the words that a key accepts instead of a number. A word stands for one number in each range of
      router rows.
    * `phases` are the phases in which the policy selects, unless a user chooses other phases.
    * If `selects` is False, the policy leaves every step unchanged and has no common keys.
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
        """Return the value of a key that the user does not set.

        If the policy also has required keys, return the default in the signature of its function.
        """
        try:
            return self.resolve({})[name]
        except ValueError:
            return self.defaults[name]

    @property
    def changes(self) -> list[int]:
        """Return the row counts at which a range in `tables` begins, in ascending order and without 1."""
        return sorted(
            {first for words in self.tables.values() for table in words.values() for first in table if first > 1}
        )

    def build(self, keys: Mapping[str, Any], rows: int | None = None) -> SelectionPlan:
        """Return the plan for these keys in a step of `rows` router rows. If `rows` is None, use `PLAIN_ROWS` rows.

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
        """Return one error text for each required key that is missing in `keys`."""
        required = {name: key for name, key in self.keys.items() if name not in self.defaults and name not in keys}
        return [f"{name} is missing: {self.name} needs {key.allowed}" for name, key in required.items()]

    def resolve(self, keys: Mapping[str, Any], rows: int | None = None) -> dict[str, Any]:
        """Return the value of every key of the policy.

        The value is the given one or the default. If `rows` is given, each word is replaced by its number for this row
        count.
        """
        plan, given = self.build(keys, rows), self._check_values(self.complete(keys))
        given = given if rows is None else self._look_up(given, rows)
        return {name: given.get(name, getattr(plan, name, self.defaults.get(name))) for name in self.keys}

    def find_tables(self, values: Mapping[str, Any]) -> dict[str, Table]:
        """Return the tables of all keys whose value is a word with a table in `tables`."""
        return {name: table for name, words in self.tables.items() if (table := words.get(values.get(name, "")))}

    def _look_up(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return the values. Each word in `tables` is replaced by its number for a step of `rows` router rows."""
        return {**values, **{name: look_up(table, rows) for name, table in self.find_tables(values).items()}}

    def _check_values(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.keys[name].check(name, value) for name, value in keys.items()}


PLAIN_ROWS = 8
"""The number of router rows for which a plan is built if the caller gives no number."""
_POLICIES: dict[str, Policy] = {}


def register(
    name: str, paper: str, *, own_keys: Mapping[str, Key] | None = None, summary: str = "", **options: Any
) -> Callable[[Callable[..., SelectionPlan]], Callable[..., SelectionPlan]]:
    """Register a function as the policy called `name`.

    The parameters of the function are the keys of the policy. The first line of its docstring is the summary, unless
    `summary` is given. `own_keys` contains the accepted values of keys. A key that is not in `own_keys` accepts
    the same values as the plan's key of this name. A key accepts None only if the type annotation of its parameter
    allows None.
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
    """Return the policy called `name`. Raises ValueError for an unknown name.

    The error lists the known names. If `name` is the name of a preset, the error contains the keys of the preset
    instead.
    """
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

    The value of some keys depends on the number of router rows in a step. An example is the default `mass` of `xshare`.
    The plan contains the values for `PLAIN_ROWS` rows.

    Raises ValueError naming the policy or the key, the value and what is allowed.
    """
    if isinstance(policy, Mapping):
        if "policy" not in policy:
            raise ValueError(f'policy = {as_json(dict(policy))}: must be an object with a key "policy"')
        keys = {**policy, **keys}
        policy = keys.pop("policy")
    return get_policy(policy).build(keys)
