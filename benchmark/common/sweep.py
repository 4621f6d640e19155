"""A sweep, which measures several points and adds each one to a record."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmark.common.record import Record


def fill(record: Record, calls: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
    """Measure every point that is missing in the record. Each point is written to disk after its measurement."""
    for key, call in calls.items():
        if key not in record:
            print(f"{key} ...", flush=True)
            record.add(key, **call())
