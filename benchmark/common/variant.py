"""The rows of a comparison: a policy as a command line spells it, its server flags, and its plan."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_xshare import SelectionPlan
from sglang_xshare.policies import get_policy
from sglang_xshare.policies.common import COMMON_KEYS
from sglang_xshare.policies.spelling import SPELLING, parse_policy

__all__ = ["BASELINE", "OFF", "PLAN_SPELLING", "SPELLING", "Variant", "parse_plan", "parse_variant"]
PLAN_SPELLING = f"{SPELLING}, without {', '.join(COMMON_KEYS)}"
"""The spelling of a policy that is measured outside a server, in every step and layer."""
BASELINE = "vanilla"
OFF = "off"
"""A server without the flag."""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: its unique label, an expert policy and its configuration, and further server flags.

    `policy` is None for a server without the flag; empty `keys` mean the defaults.
    """

    name: str
    policy: str | None
    keys: dict[str, Any]
    args: tuple[str, ...] = ()

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Variant":
        """Read the recorded fields."""
        return cls(**{**recorded, "args": tuple(recorded["args"])})

    def server_args(self) -> list[str]:
        """Return the flags to append to `sglang.launch_server`."""
        flags = [] if self.policy is None else ["--expert-policy", self.policy]
        if self.keys:
            flags += ["--expert-policy-config", json.dumps(self.keys)]
        return [*flags, *self.args]

    def body(self) -> dict[str, Any]:
        """Return the body that activates the policy on a running server; without the flag, the baseline's."""
        return {"policy": self.policy or BASELINE, **self.keys}


def parse_variant(text: str, args: Sequence[str] = ()) -> Variant:
    """Read one policy, spelt as for the server, or "off" for no flag. Raises ValueError for another spelling."""
    name, keys = parse_policy(text)
    return Variant(text, None if name == OFF else name, keys, tuple(args))


def parse_plan(text: str, rows: int | None = None) -> SelectionPlan:
    """Return the plan of a policy, spelt by `PLAN_SPELLING`, for a step of `rows` router rows.

    Raises ValueError for another spelling.
    """
    variant = parse_variant(text)
    for key in COMMON_KEYS:
        if key in variant.keys:
            raise ValueError(f"policy must be {PLAN_SPELLING} (got {text!r}: {key} needs a server)")
    policy = get_policy(variant.policy or BASELINE)
    return policy.build(variant.keys or policy.bare, rows)
