"""What a stage tells: its part of the decode log line, and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .balance import Balance, BalanceExporter, BalanceReader, format_balance
from .governor import Governed, GovernorExporter, format_governor
from .metrics import Counters, Exporter, Reader, format_log
from .observe import Observation, ObservationExporter, ObservationReader, format_observed


class Reports:
    """Log and metrics each read what was counted since their own last look; whoever looks waits for the device."""

    def __init__(self, counters: Counters, balance: Balance | None) -> None:
        self.logged, self.exported = Reader(counters), Reader(counters)
        self.exporter, self.plans_exporter, self.governor_exporter = (
            Exporter(),
            ObservationExporter(),
            GovernorExporter(),
        )
        if balance is not None:
            self.logged_balance, self.exported_balance = BalanceReader(balance), BalanceReader(balance)
            self.balance_exporter = BalanceExporter()
        self._observation: Observation | None = None
        self._published = 0, 0
        """What the scheduler had counted when the metrics were last due."""

    def tell_of(
        self,
        plan: Mapping[str, Any] | None,
        observation: Observation | None,
        balances: bool,
        governor: Governed | None,
    ) -> None:
        """From now on tell of this plan, and what else it has counted."""
        self.exporter.plan = plan
        self._balances, self._governor = balances, governor
        former, self._observation = self._observation, observation
        if observation is not None and observation is not former:
            self.logged_plans, self.exported_plans = ObservationReader(observation), ObservationReader(observation)

    def forget(self) -> None:
        """Have the next `is_due` say so even where no step was made since the last."""
        self._published = -1, -1

    def log(self) -> str:
        """The end of a decode log line."""
        text = format_log(self.logged.read())
        if self._balances:
            text += format_balance(self.logged_balance.read())
        if self._observation is not None:
            plans, _ = self.logged_plans.read()
            text += format_observed(plans)
        return text + format_governor(self._governor)

    def is_due(self, reporter: Any) -> bool:
        """Whether upstream's `reporter` has seen a step since this was last asked."""
        # An idle server asks again and again, and must not copy from the device each time. SGLang counts forwards, also
        # those for other ranks' requests alone, when it launches them, and decode steps when they are done.
        forwards = reporter.scheduler.forward_ct, reporter.forward_ct_decode
        former, self._published = self._published, forwards
        return forwards != former

    def publish(self, reporter: Any) -> None:
        """Bring the metrics of upstream's `reporter` up to date."""
        if not reporter.current_scheduler_metrics_enabled:
            return
        labels = reporter.metrics_collector.labels
        self.exporter.export(self.exported.read(), labels)
        if self._balances:
            self.balance_exporter.export(self.exported_balance.read(), labels)
        if self._observation is not None:
            self.plans_exporter.export(*self.exported_plans.read(), labels)
        self.governor_exporter.export(self._governor, labels)
