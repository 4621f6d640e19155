"""A guard for reports: a failed report does not end the server."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Attempts:
    """A callable that updates a report. It logs the first failure of each report, and never raises."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, what: str, update: Callable[[], str | None]) -> str | None:
        """Call `update` and return its result, or None if it raises. The log names the report by `what`."""
        try:
            return update()
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                logger.exception("Expert policy: could not bring the %s up to date; this is logged once", what)
            return None
