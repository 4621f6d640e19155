"""A machine as seconds of one of each thing that a step does: constants that are looked up, or fitted to measurements.

A step's time is a sum of products, so that least squares find the constants, and anybody can find those of another
machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..keys import read_object


@dataclass(frozen=True)
class _Terms:
    """`layers`: MoE layers. `read`: bytes of weights and KV cache. `flops`: operations of a rank's rows in experts.
    `near`: exchanges that stay among ranks of one node, `far`: those that other nodes take part in; `near_bytes` and
    `far_bytes`: what a rank sends to its own node and to others.
    """

    layers: float = 0.0
    read: float = 0.0
    flops: float = 0.0
    near: float = 0.0
    near_bytes: float = 0.0
    far: float = 0.0
    far_bytes: float = 0.0


LONGEST = 1e6
"""Seconds that a file may say one of anything takes: what is computed of them stays finite."""
TERMS = tuple(field.name for field in fields(_Terms))


class Work(_Terms):
    """What the rank that a step waits for does: how much of each."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in TERMS))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, name) * times for name in TERMS))


class Machine(_Terms):
    """Seconds of one of each that `Work` counts; 0 for what takes no time, or is not known to."""

    def time(self, work: Work) -> float:
        """Seconds that the work takes."""
        return float(sum(getattr(self, name) * getattr(work, name) for name in TERMS))


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """The machine whose times are nearest to `seconds` in relative terms, by least squares with no constant below 0: a
    term that comes out negative is left out, the most negative first. Raises ValueError for no measurement, and for a
    time that is not positive.
    """
    import numpy as np  # which no other verb needs

    times = np.array(seconds, dtype=np.float64)
    if not len(times) or len(times) != len(works) or not (times > 0).all():
        raise ValueError(f"{len(works)} works, {len(times)} times: allowed are as many, at least one, all above 0")
    counts = np.array([[getattr(work, name) for name in TERMS] for work in works], dtype=np.float64) / times[:, None]
    scale = np.abs(counts).max(0)
    kept = [column for column in range(len(TERMS)) if scale[column] > 0]
    found = np.zeros(len(TERMS))
    while kept:
        solved = np.linalg.lstsq(counts[:, kept] / scale[kept], np.ones(len(times)), rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved / scale[kept]
            break
        kept.pop(int(solved.argmin()))
    return Machine(*found.tolist())


def leave_one_out(works: Sequence[Work], seconds: Sequence[float]) -> list[float]:
    """By how much each time is missed, as a share of it, by the machine that is fitted to all others: above 0 where the
    prediction is too long.
    """
    misses = []
    for left, (work, time) in enumerate(zip(works, seconds, strict=True)):
        others = [number for number in range(len(works)) if number != left]
        machine = fit([works[number] for number in others], [seconds[number] for number in others])
        misses.append(machine.time(work) / time - 1)
    return misses


def write_machine(machine: Machine, path: Path) -> None:
    """Keep it as the JSON that `read_machine` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(machine), indent=1) + "\n")


def read_machine(path: Path) -> Machine:
    """A machine out of a file. Raises ValueError, one line, where it holds none."""
    allowed = f"allowed is a JSON object of seconds, {', '.join(TERMS)}, such as benchmark.cost.model writes"
    try:
        found = read_object(path.read_bytes())
        for name, value in found.items():
            if type(value) not in (int, float):
                raise ValueError(f"{name} is {json.dumps(value)}, no number")
        machine = Machine(**found)
    except (OSError, ValueError, TypeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("; allowed")[0]
        raise ValueError(f"--machine {path}: {reason}; {allowed}") from None
    if not all(0 <= value <= LONGEST for value in asdict(machine).values()):
        raise ValueError(f"--machine {path}: a constant below 0, or above {LONGEST:g} s; {allowed}")
    if not machine.read:
        raise ValueError(f"--machine {path}: read is missing, or 0: experts would load in no time; {allowed}")
    return machine
