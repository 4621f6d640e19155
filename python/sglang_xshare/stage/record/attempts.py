"""Reports whose failures do not end the server."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Attempts:
    """A wrapper of reports, which logs the first failure of each report and never raises."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, what: str, update: Callable[[], str | None]) -> str | None:
        """Return the result of `update`, or None if it fails. `what` is the name of the report."""
        try:
            return update()
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                logger.exception("Expert policy: could not bring the %s up to date; this is logged once", what)
            return None
