"""The figures of a plan: its loss, its distance from vanilla, and its active experts or page-ins."""

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
"""The smallest accepted mean of rows in a step, as a share of the batch. Steps before the last prefill have fewer rows.
"""


@dataclass(frozen=True)
class Measurement:
    """The figures of one plan.

    `nats` contains the mean cross-entropy of each sample, in nats per token. `divergences` contains the distance of
    each sample from vanilla's predictions (see `diverge`), in nats per token. `greedy` contains the most likely tokens
    of each sample. `before` is the mean number of vanilla's active experts in a counted layer and step. `saved` is the
    number of active experts that the plan saves in a step, summed over all layers. `kept_mass` is the plan's mean kept
    mass in the counted layers.

    With paged experts, `before` and `saved` count page-ins, and both counts start with the same loaded experts. The
    last three figures are None if no layer selects experts.
    """

    nats: list[float]
    divergences: list[float]
    greedy: list[list[int]]
    before: float | None
    saved: float | None
    kept_mass: float | None

    @property
    def cross_entropy(self) -> float:
        """Return the mean cross-entropy in nats per token."""
        return fmean(self.nats)


@dataclass(frozen=True)
class Loss:
    """The difference of two cross-entropies on the same samples, in nats per token.

    `error` is the paired standard error.
    """

    delta: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval."""
        return self.delta - 1.96 * self.error, self.delta + 1.96 * self.error


def compare(found: Measurement, vanilla: Measurement) -> Loss:
    """Return the loss relative to vanilla. Both measurements need the same samples, at least two."""
    differences = [nats - own for nats, own in zip(found.nats, vanilla.nats, strict=True)]
    return Loss(fmean(differences), stdev(differences) / len(differences) ** 0.5)


def agreement(found: Measurement, vanilla: Measurement) -> float:
    """Return the share of positions at which both measurements have the same most likely token."""
    pairs = zip(found.greedy, vanilla.greedy, strict=True)
    same = [one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)]
    return fmean(same)


def check_rows(since: dict[str, Any], rows: int) -> None:
    """Raise ValueError if the steps do not have the requested number of rows.

    `since` contains the server's counts since the last switch.
    """
    counted = since["rows"] / since["layer_steps"]
    if not LEAST_ROWS * rows <= counted <= rows * 1.01:
        raise ValueError(
            f"{counted:.1f} rows a step in place of {rows}; must be a server of one replica without other traffic "
            "and with a --max-running-requests that lets all decode together"
        )


Measure = Callable[[dict[str, Any], int, str], Measurement]
"""A function that takes a policy, a batch size and a part of the samples, and decodes the part under the policy."""


def hash_asked(*asked: Any) -> str:
    """Return a digest of `asked` and of the figures' names.

    `asked` is all that a measurement depends on: the model, the layers, the samples and the unit.
    """
    return hashlib.sha256(orjson.dumps([*asked, [one.name for one in fields(Measurement)]])).hexdigest()


class Bench:
    """Measurements of plans. Each measurement is made only once, and raises the errors of `measure`.

    The file `trace` contains the measurements of earlier runs. They count only if they have the same digest `asked`
    (see `hash_asked`).
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
        """The keys of all requested measurements, whether they were known or not."""

    def run(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Return the measurement of a policy on a part of the samples.

        `batch` is the number of samples that are decoded together.
        """
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
