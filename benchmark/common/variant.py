"""What is compared: a policy as it is spelt on the command line, the server flags it stands for, and its plan."""

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
"""Of what is measured outside a server, in every step and layer."""
BASELINE = "vanilla"
OFF = "off"
"""A server without the flag."""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: its label, unique within one; the name of an expert policy, None for a server without
    the flag, and its configuration, of which {} leaves the defaults; further server flags, such as those of
    speculative decoding.
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

    def body(self) -> dict[str, Any]:
        """What is posted to a running server for it; without the flag, the baseline."""
        return {"policy": self.policy or BASELINE, **self.keys}


def parse_variant(text: str, args: Sequence[str] = ()) -> Variant:
    """Read one policy, spelt as for the server, or "off": without the flag. Raises ValueError otherwise."""
    name, keys = parse_policy(text)
    return Variant(text, None if name == OFF else name, keys, tuple(args))


def parse_plan(text: str, rows: int | None = None) -> SelectionPlan:
    """Return the plan of a policy, spelt as `PLAN_SPELLING` says, in a step of `rows` router rows if its numbers follow
    these. Raises ValueError for another spelling.
    """
    variant = parse_variant(text)
    for key in COMMON_KEYS:
        if key in variant.keys:
            raise ValueError(f"policy {text!r}: {key} takes a server, which this is not; allowed is {PLAN_SPELLING}")
    policy = get_policy(variant.policy or BASELINE)
    return policy.build(variant.keys or policy.bare, rows)
