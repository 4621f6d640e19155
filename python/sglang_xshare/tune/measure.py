"""The figures of one plan on some texts: its loss, its distance from vanilla, its active experts or page-ins."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson

LEAST_ROWS = 0.75
"""The least mean rows of a step, as a share of the batch: steps before the last prefill have fewer rows."""


@dataclass(frozen=True)
class Measurement:
    """Figures of one plan.

    `nats`: the mean cross-entropy of each sample, in nats a token. `divergences`: the distance from vanilla's
    predictions by `diverge`, in nats a token. `greedy`: the most likely tokens, sample by sample. `before`: vanilla's
    active experts of a layer and step, in the counted layers. `saved`: vanilla's active experts of a step less the
    plan's, summed over all layers. `kept_mass`: the plan's mean in the counted layers. With paged experts `before` and
    `saved` count page-ins, from the same loaded experts. These last three are None if no layer selects.
    """

    nats: list[float]
    divergences: list[float]
    greedy: list[list[int]]
    before: float | None
    saved: float | None
    kept_mass: float | None

    @property
    def cross_entropy(self) -> float:
        """Return nats a token."""
        return fmean(self.nats)


@dataclass(frozen=True)
class Loss:
    """The difference of two cross-entropies on the same samples, nats a token, with the paired standard error."""

    delta: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval of 95 %."""
        return self.delta - 1.96 * self.error, self.delta + 1.96 * self.error


def compare(found: Measurement, vanilla: Measurement) -> Loss:
    """Return the loss, sample by sample, of at least two samples."""
    differences = [nats - own for nats, own in zip(found.nats, vanilla.nats, strict=True)]
    return Loss(fmean(differences), stdev(differences) / len(differences) ** 0.5)


def agreement(found: Measurement, vanilla: Measurement) -> float:
    """Return the share of positions at which both prefer the same token."""
    pairs = zip(found.greedy, vanilla.greedy, strict=True)
    same = [one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)]
    return fmean(same)


def check_rows(since: dict[str, Any], rows: int) -> None:
    """Raise ValueError if the steps counted in `since_switch` had another number of rows than requested."""
    counted = since["rows"] / since["layer_steps"]
    if not LEAST_ROWS * rows <= counted <= rows * 1.01:
        raise ValueError(
            f"{counted:.1f} rows a step in place of {rows}; must be a server of one replica without other traffic "
            "and with a --max-running-requests that lets all decode together"
        )


Measure = Callable[[dict[str, Any], int, str], Measurement]
"""A function of (policy, batch, part) that decodes a part of the samples under a policy, `batch` at a time."""


def hash_asked(*asked: Any) -> str:
    """Return a digest of all that a measurement depends on: model, layers, samples, unit, and the figures' names."""
    return hashlib.sha256(orjson.dumps([*asked, [one.name for one in fields(Measurement)]])).hexdigest()


class Bench:
    """Measurements of plans, each made once; the file `trace` has those of former runs. Raises what `measure` does.

    Measurements in the file count only if they have the same `asked`, a digest by `hash_asked`.
    """

    def __init__(self, measure: Measure, trace: Path, asked: str = "") -> None:
        self.measure = measure
        self.trace = trace
        self.of = asked
        self.known: dict[str, Measurement] = {}
        if trace.exists():
            whole, _, _ = trace.read_text().rpartition("\n")  # a killed run may leave half a line
            trace.write_text(f"{whole}\n" if whole else "")
            for line in whole.splitlines():
                record = json.loads(line)
                of, key = record.pop("of", None), record.pop("key")
                if of == asked:
                    self.known[key] = Measurement(**record)
        self.measured = 0
        self.asked: set[str] = set()
        """Keys of all runs, known or not."""

    def run(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Return the measurement of a policy on a part of the samples, of which `batch` decode together."""
        key = json.dumps([policy, batch, part], sort_keys=True)
        self.asked.add(key)
        if key not in self.known:
            self.known[key] = self.measure(policy, batch, part)
            self.measured += 1
            with self.trace.open("a") as file:
                file.write(json.dumps({"of": self.of, "key": key, **asdict(self.known[key])}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return self.known[key]
