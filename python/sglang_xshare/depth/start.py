"""The setup of the draft depth policy in a scheduler process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..upstream.drafts import forward_counter, silence_switches
from ..upstream.graphs import list_sizes
from ..upstream.ranks import share_first
from ..upstream.server import resolved
from .policy import ThroughputPolicy
from .report import DepthReport

if TYPE_CHECKING:
    from ..stage.stage import Stage


def start(worker: Any, upstream: Any, steps: int, stage: Stage | None) -> DepthReport:
    """Build the depth policy of an EAGLE `worker`. Return its reports.

    The policy replaces `upstream`, which is SGLang's own policy. The first depth is `steps`. If there is a `stage`, it
    estimates the acceptance chance of a draft token from the policy's counts.
    """
    switches = {} if stage is None else {"count_switches": lambda: stage.last_switch.number}
    policy = ThroughputPolicy(
        upstream,
        steps,
        forward_counter(worker),
        take_first_ranks=share_first,
        list_captured=lambda: list_sizes(worker.target_worker.model_runner, resolved(worker.server_args)),
        **switches,
    )
    if stage is not None:
        shares = policy.depths.shares
        stage.acceptance.follow(policy.candidate_steps[-1] + 1, lambda: shares.pooled)
    silence_switches()
    return DepthReport(policy)
