"""Draft depths in the decode log, in GET /expert_policy and on `/metrics`."""

from typing import Any

from ..stage.record.attempts import Attempts
from ..stage.record.figures import Exporter
from ..upstream.ranks import is_first_rank
from .policy import ThroughputPolicy

GROUP = "depth"
"""The group of depths in `FIGURES` (stage/record/figures.py)."""


class DepthReport:
    """The reports on one scheduler's depths, from numbers of the host alone: they never wait for the device."""

    def __init__(self, policy: ThroughputPolicy) -> None:
        self.policy = policy
        self._exporter = Exporter()
        self._published = 0
        self._attempt = Attempts()

    def log(self) -> str:
        """Return the end of a decode log line: the depth of the last batch size; empty before a verification."""
        latest = self.policy.latest
        return "" if latest is None else f", draft depth {self.policy.depths.states[latest].depth}"

    def describe(self) -> dict[str, Any]:
        """Return the shares of accepted drafts by depth, empty before a draft, and the depths of each batch size.

        For the depth in use, and for each depth with a time, a batch size has the tokens that a request gets in a step
        and the step's milliseconds.
        """
        shares = self.policy.depths.shares
        tokens, sizes = shares.expect(), []
        for size, state in sorted(self.policy.depths.states.items()):
            times = {depth: seconds * 1e3 for depth, seconds in sorted(state.seconds.items())}
            by_depth = [{"depth": depth, "tokens": tokens[depth], "ms": ms} for depth, ms in times.items()]
            own = {"depth": state.depth, "tokens": tokens[state.depth], "ms": times.get(state.depth)}
            sizes.append({"batch_size": size, **own, "verifications": state.clock, "by_depth": by_depth})
        return {"accepted": [] if shares.pooled is None else shares.shares, "batch_sizes": sizes}

    def publish(self, reporter: Any) -> None:
        """Export the depths to the metrics of upstream's `reporter`, on the first rank, if new steps were verified."""
        if reporter is None or self._published == self.policy.verifications or not is_first_rank():
            return
        self._published = self.policy.verifications
        if not reporter.current_scheduler_metrics_enabled:
            return
        labels = reporter.metrics_collector.labels
        self._attempt("metrics", lambda: self._exporter.export(GROUP, self.describe()["batch_sizes"], labels))
