"""The reports of draft depths in the decode log, in GET /expert_policy and on `/metrics`."""

from typing import Any

from ..stage.record.attempts import Attempts
from ..stage.record.figures import Exporter
from ..upstream.ranks import is_first_rank
from .policy import ThroughputPolicy

GROUP = "depth"
"""The group of figures about depths in `FIGURES` (stage/record/figures.py)."""


class DepthReport:
    """The reports of one scheduler's depths. They use only numbers on the host, so they never wait for the device."""

    def __init__(self, policy: ThroughputPolicy) -> None:
        self.policy = policy
        self._exporter = Exporter()
        self._published = 0
        self._attempt = Attempts()

    def log(self) -> str:
        """Return the end of a decode log line, which shows the depth of the last batch size.

        Return "" before the first verify step.
        """
        latest = self.policy.latest
        return "" if latest is None else f", draft depth {self.policy.depths.states[latest].depth}"

    def describe(self) -> dict[str, Any]:
        """Return the shares of accepted draft tokens and the state of each batch size.

        The list of shares is empty before the first draft token. The state of a batch size describes the depth in use
        and all depths that have a measured time. For each of these depths, it contains the tokens that a request gets
        in a step, and the time of the step in milliseconds.
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
        """Export the depths to SGLang's metrics. Only the first rank exports them, and only after new verify steps."""
        if reporter is None or self._published == self.policy.verifications or not is_first_rank():
            return
        self._published = self.policy.verifications
        if not reporter.current_scheduler_metrics_enabled:
            return
        labels = reporter.metrics_collector.labels
        self._attempt("metrics", lambda: self._exporter.export(GROUP, self.describe()["batch_sizes"], labels))
