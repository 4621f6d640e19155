"""The reports of a stage: its part of the decode log line, the figures on /metrics, and the trace."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from .lane import format_observed
from .record.agreement import Agreement
from .record.attempts import Attempts
from .record.figures import Exporter
from .record.interval import format_log

logger = logging.getLogger(__name__)


class Reports:
    """The log, the metrics and the trace of a `Stage`, each of which reads the counts since its own last read.

    A read waits for the device. The first failure of each is logged: neither a full disk nor a value that metrics
    refuse may end the server, or make the one rank that writes for all ranks miss their switch.
    """

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self._exported_agreement: Counter[str] = Counter()
        self._attempt = Attempts()
        self.exporter = Exporter()
        self._published = 0, 0
        """The scheduler's counts of forwards at the last call of `note`."""
        self.reporter: Any = None
        """The metrics reporter of upstream's scheduler; None before its first request or first idle turn."""
        self._unpublished = 0
        """Forwards since the last call of `note`."""

    def log(self) -> str:
        """Return the end of a decode log line."""
        acting, lanes = self._stage.acting, self._stage.in_force.lanes
        return self._attempt("log line", lambda: format_log(acting.logged.read()) + format_observed(lanes)) or ""

    def note(self, reporter: Any) -> bool:
        """Note the forwards that upstream's `reporter` has counted. Return whether any are new since the last call."""
        # An idle server calls this again and again, and must not copy from the device each time. SGLang counts forwards
        # at their launch, also those for other ranks' requests alone, and decode steps when they are done.
        self.reporter, self._unpublished = reporter, 0
        forwards = reporter.scheduler.forward_ct, reporter.forward_ct_decode
        former, self._published = self._published, forwards
        return forwards != former

    def count_forward(self) -> Any:
        """Count a forward. Return the reporter to publish to if a publication is overdue, else None.

        A publication is overdue if more forwards than a decode log interval have passed since the last call of `note`.
        A rank that decodes publishes earlier than that, with its log.
        """
        self._unpublished += 1
        overdue = self.reporter is not None and self._unpublished > self.reporter.decode_log_interval
        return self.reporter if overdue else None

    def publish(self, reporter: Any) -> None:
        """Update the metrics of upstream's `reporter`, and the trace."""
        stage = self._stage
        groups: dict[str, Callable[[], Any]] = {
            "in force": lambda: (stage.in_force.plan, stage.acceptance.estimate),
            "counted": stage.acting.exported.read,
            "observed": lambda: {lane.name: lane.exported.read() for lane in stage.in_force.lanes},
        }
        if stage.agreement is not None:
            groups["compared"] = partial(self._read_compared, stage.agreement)
        if reporter.current_scheduler_metrics_enabled:
            for group, read in groups.items():
                self._attempt("metrics", partial(self._export, group, read, reporter))
        if stage.trace is not None and reporter.is_stats_logging_rank:
            self._attempt("trace", stage.trace.write)

    def close(self) -> None:
        """Write the trace, and log the counts since the last read."""
        if self._stage.trace is not None:
            self._attempt("trace", self._stage.trace.write)
        if any(self._stage.acting.exported.read().outcomes.values()):
            logger.info("Expert policy, at the end: %s", self.log().removeprefix(", "))

    def _export(self, group: str, read: Callable[[], Any], reporter: Any) -> None:
        self.exporter.export(group, read(), reporter.metrics_collector.labels)

    def _read_compared(self, agreement: Agreement) -> Counter[str]:
        now = agreement.counts.copy()
        new, self._exported_agreement = now - self._exported_agreement, now
        return new
