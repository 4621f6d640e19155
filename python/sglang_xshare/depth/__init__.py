"""Adaptive draft depth: `--speculative-adaptive` with the depth of the most tokens per second, for each batch size.

`decision.py` decides, without SGLang and a clock; `policy.py` is SGLang's `AdaptiveSpecPolicy`.
"""

from typing import Any

from ..upstream.server import is_release

THROUGHPUT, UPSTREAM = "throughput", "upstream"
"""The values of --expert-policy-draft-depth."""
SINCE = "0.5.20"
"""The first release that passes an `AdaptiveSpecPolicy` to its `AdaptiveController`."""


def is_on(config: Any) -> bool:
    """Return whether the depth follows the tokens per second, by a server's arguments.

    The depth does so if the user asks for `THROUGHPUT`, and by default if a policy is given. Resolved arguments have
    `speculative_adaptive` only if SGLang's drafter adapts.
    """
    if not getattr(config, "speculative_adaptive", False):
        return False
    asked = getattr(config, "expert_policy_draft_depth", None)
    if asked is None:
        policy = getattr(config, "expert_policy", None) or "vanilla"
        return policy.partition(":")[0] != "vanilla" and is_release(SINCE)
    return bool(asked == THROUGHPUT)
