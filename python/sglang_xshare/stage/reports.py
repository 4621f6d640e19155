"""The reports of a stage: its part of the decode log line, the figures on /metrics, and the trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..upstream.ranks import is_first_rank
from .lane import format_observed
from .record.attempts import Attempts
from .record.figures import Exporter
from .record.interval import format_log
from .stage import Stage

logger = logging.getLogger(__name__)


class Reports:
    """The log, the metrics and the trace of a stage. Each of them reports the counts since its own last report.

    A report waits for the device. The stage reports once in each log interval, in a switch, and when the server becomes
    idle.

    The first failure of each report is logged, but a failed report does not raise. Otherwise a full disk, or a value
    that prometheus refuses, could end the server. It could also make the first rank miss a switch that the other ranks
    make.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.exporter = Exporter()
        self.reporter: Any = None
        """The metrics reporter of SGLang's scheduler. It does not exist yet when the stage starts. Each hook that a
        scheduler calls (`publish`, `handle`, `admit`) sets it, because any of them can be the first.
        """
        self._attempt = Attempts()
        self._published = 0, 0
        """The scheduler's counts of forwards and decode steps at the last call of `publish`."""
        self._unpublished = 0
        """The number of forwards since the last call of `publish`."""

    def publish_if_due(self, forward_batch: Any) -> None:
        """Call `publish` if more than `decode_log_interval` forwards have run since its last call.

        Only a server with data-parallel attention needs this call.
        """
        # The first rank reports for all ranks. It may have no requests for a long time, and then it writes no decode
        # log line. A rank that decodes publishes earlier, together with its log line.
        if getattr(forward_batch, "global_num_tokens_cpu", None) is None:
            return
        self._unpublished += 1
        if self.reporter is not None and self._unpublished > self.reporter.decode_log_interval:
            self.publish()

    def log(self) -> str:
        """Return the counts since the last decode log line, as the end of a new line."""
        acting, lanes = self.stage.acting, self.stage.in_force.lanes
        return self._attempt("log line", lambda: format_log(acting.logged.read()) + format_observed(lanes)) or ""

    def publish(self, always: bool = False) -> None:
        """Update the metrics and the trace. Only the first rank does this, because all ranks run the same steps.

        Do nothing if there is no reporter, or if no step has run since the last call. With `always`, update even
        without a new step. Raises `SlotsExceeded` as `PagedLayers.check` does.
        """
        reporter, self._unpublished = self.reporter, 0
        if reporter is None or not is_first_rank():
            return
        # An idle server calls this method again and again, and these calls must not copy from the device. `forward_ct`
        # counts forwards when they are launched, even if only other ranks have requests. `forward_ct_decode` counts
        # decode steps when they are finished.
        forwards = reporter.scheduler.forward_ct, reporter.forward_ct_decode
        is_new, self._published = forwards != self._published, forwards
        if not (is_new or always):
            return
        stage = self.stage
        if stage.paged is not None:
            stage.paged.check(stage.acting.counters.totals)
        groups: dict[str, Callable[[], Any]] = {
            "in force": lambda: (stage.in_force.shown, stage.acceptance.estimate),
            "counted": stage.acting.exported.read,
            "observed": lambda: {lane.name: lane.exported.read() for lane in stage.in_force.lanes},
        }
        if stage.agreement is not None:
            groups["compared"] = stage.agreement.take_counts
        if reporter.current_scheduler_metrics_enabled:
            for group, read in groups.items():
                self._attempt(f"metrics ({group})", partial(self._export, group, read))
        if stage.trace is not None and reporter.is_stats_logging_rank:
            self._attempt("trace", stage.trace.write)

    def close(self) -> None:
        """Write the trace and log the counts when a process without a scheduler ends, such as `one_batch`."""
        if self.reporter is not None or not is_first_rank():
            return
        if self.stage.trace is not None:
            self._attempt("trace", self.stage.trace.write)
        if any(self.stage.acting.exported.read().outcomes.values()):
            logger.info("Expert policy, at the end: %s", self.log().removeprefix(", "))

    def _export(self, group: str, read: Callable[[], Any]) -> None:
        self.exporter.export(group, read(), self.reporter.metrics_collector.labels)
