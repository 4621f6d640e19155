"""A sweep: points that are measured one after another into a record."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmark.common.record import Record


def fill(record: Record, calls: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
    """Measure every point that the record lacks, in this order; a point is recorded as soon as it is measured."""
    for key, call in calls.items():
        if key not in record:
            print(f"{key} ...", flush=True)
            record.add(key, **call())
