"""What is compared: a policy as it is spelt on the command line, the server flags it stands for, and its plan."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_xshare import SelectionPlan
from sglang_xshare.policies import get_policy

SPELLING = "NAME, NAME:key=value,key=value or NAME:{JSON object}, such as xshare:k0=1,add=24"
BASELINE = "vanilla"
OFF = "off"
"""A server without the flag."""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison.

    Attributes:
        name: the row's label, unique within a comparison.
        policy: name of an expert policy; None starts the server without the flag.
        keys: the policy's configuration; {} leaves its published defaults.
        args: further server flags, such as those of speculative decoding.
    """

    name: str
    policy: str | None
    keys: dict[str, Any]
    args: tuple[str, ...] = ()

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Variant":
        """One out of a record."""
        return cls(**{**recorded, "args": tuple(recorded["args"])})

    def server_args(self) -> list[str]:
        """The flags to append to `sglang.launch_server`."""
        flags = [] if self.policy is None else ["--expert-policy", self.policy]
        if self.keys:
            flags += ["--expert-policy-config", json.dumps(self.keys)]
        return [*flags, *self.args]


def parse_variant(text: str, args: Sequence[str] = ()) -> Variant:
    """Read one policy, spelt as `SPELLING` says; "off" is a server without the flag. Values are JSON, else text.

    Raises:
        ValueError: the text is spelt otherwise.
    """
    name, colon, keys = text.partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or (colon and not keys):
        raise ValueError(f"policy {text!r}: allowed is {SPELLING}")
    try:
        parsed = (
            json.loads(keys) if keys.startswith("{") else dict(_parse_pair(pair) for pair in keys.split(",") if pair)
        )
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}; allowed is {SPELLING}") from None
    return Variant(text, None if name == OFF else name, parsed, tuple(args))


def parse_plan(text: str, speculative: bool = False) -> SelectionPlan:
    """The plan of a policy, spelt as `SPELLING` says; without keys, the published ones.

    Raises ValueError saying what is wrong and what is allowed.
    """
    variant = parse_variant(text)
    policy = get_policy(variant.policy or BASELINE)
    return policy.build(variant.keys or policy.default_keys(speculative))


def _parse_pair(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not key or not equals or not value:
        raise ValueError(f"{pair!r} is no key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
