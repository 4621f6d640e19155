"""Adaptive draft depth, which gives each batch size the depth with the most tokens per second.

It requires `--speculative-adaptive`. `decision.py` chooses the depths, without SGLang or a clock. `policy.py`
implements SGLang's `AdaptiveSpecPolicy`.
"""

from typing import Any

from ..upstream.server import is_release

THROUGHPUT, UPSTREAM = "throughput", "upstream"
"""The values of --expert-policy-draft-depth."""
SINCE = "0.5.20"
"""The first SGLang release that passes an `AdaptiveSpecPolicy` to its `AdaptiveController`."""


def is_on(config: Any) -> bool:
    """Return whether a server with these arguments chooses the depth by tokens per second.

    The user can switch this on with `THROUGHPUT`. By default, it is on from release `SINCE`, unless the policy is
    vanilla. It is always off without `speculative_adaptive`. SGLang clears this argument if the drafter cannot adapt.
    """
    if not getattr(config, "speculative_adaptive", False):
        return False
    asked = getattr(config, "expert_policy_draft_depth", None)
    if asked is None:
        policy = getattr(config, "expert_policy", None) or "vanilla"
        return policy.partition(":")[0] != "vanilla" and is_release(SINCE)
    return bool(asked == THROUGHPUT)
