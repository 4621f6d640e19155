"""Adaptive draft depth: `--speculative-adaptive` with the depth that gives the most tokens per second at a batch size.

`decision.py` makes the decisions, without SGLang or a clock; `policy.py` implements SGLang's `AdaptiveSpecPolicy`.
"""

from typing import Any

from ..upstream.server import is_release

THROUGHPUT, UPSTREAM = "throughput", "upstream"
"""The values of --expert-policy-draft-depth."""
SINCE = "0.5.20"
"""The first release that passes an `AdaptiveSpecPolicy` to its `AdaptiveController`."""


def is_on(config: Any) -> bool:
    """Return whether a server with these arguments chooses the depth by tokens per second.

    A server does so if the user sets `THROUGHPUT`, and by default, from release `SINCE` on, with a policy except
    vanilla. Resolved arguments have `speculative_adaptive` set only if SGLang's drafter adapts.
    """
    if not getattr(config, "speculative_adaptive", False):
        return False
    asked = getattr(config, "expert_policy_draft_depth", None)
    if asked is None:
        policy = getattr(config, "expert_policy", None) or "vanilla"
        return policy.partition(":")[0] != "vanilla" and is_release(SINCE)
    return bool(asked == THROUGHPUT)
