"""The variants that a benchmark compares. A variant is a policy with its server flags."""

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
"""The spelling of a policy that a benchmark applies outside a server. The keys that need a server are not allowed."""
BASELINE = "vanilla"
OFF = "off"
"""The name of a variant without the flag `--expert-policy`."""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison.

    `name` is unique in the comparison. `policy` is the name of an expert policy, or None for a server without a policy.
    `keys` is the policy's configuration. If `keys` is empty, the policy uses its defaults. `args` are additional server
    flags.
    """

    name: str
    policy: str | None
    keys: dict[str, Any]
    args: tuple[str, ...] = ()

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Variant":
        """Create a variant from its recorded fields."""
        return cls(**{**recorded, "args": tuple(recorded["args"])})

    def server_args(self) -> list[str]:
        """Return the flags to append to `sglang.launch_server`."""
        flags = [] if self.policy is None else ["--expert-policy", self.policy]
        if self.keys:
            flags += ["--expert-policy-config", json.dumps(self.keys)]
        return [*flags, *self.args]

    def body(self) -> dict[str, Any]:
        """Return the body of the POST request that activates this policy, or `vanilla` if `policy` is None."""
        return {"policy": self.policy or BASELINE, **self.keys}


def parse_variant(text: str, args: Sequence[str] = ()) -> Variant:
    """Parse a policy, or "off" for a server without a policy. Raises ValueError if the spelling is wrong."""
    name, keys = parse_policy(text)
    return Variant(text, None if name == OFF else name, keys, tuple(args))


def parse_plan(text: str, rows: int | None = None) -> SelectionPlan:
    """Parse a policy and return its plan for a step of `rows` router rows.

    `PLAN_SPELLING` describes the allowed spelling. Raises ValueError if the spelling is wrong.
    """
    variant = parse_variant(text)
    for key in COMMON_KEYS:
        if key in variant.keys:
            raise ValueError(f"policy must be {PLAN_SPELLING} (got {text!r}: {key} needs a server)")
    policy = get_policy(variant.policy or BASELINE)
    return policy.build(variant.keys or policy.bare, rows)
