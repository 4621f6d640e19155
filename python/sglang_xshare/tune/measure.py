"""One plan on some texts: what it loses, how far it is from vanilla, how many experts are active or paged in."""

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
"""The share of a batch that a step must have in the mean: prompts are not all prefilled together."""


@dataclass(frozen=True)
class Measurement:
    """`nats`: the mean cross-entropy of each sample, in nats a token. `divergences`: how far the predictions are from
    vanilla's there, as `diverge` tells it, in nats a token too. `greedy`: the most likely tokens, sample by sample.
    `before`: active experts of a layer and step under vanilla, in the layers counted, and `kept_mass` there;
    `saved`: experts of a step that were not, summed over all layers; where experts are paged both are of those that
    vanilla would have paged in from the same state. None where none selects.
    """

    nats: list[float]
    divergences: list[float]
    greedy: list[list[int]]
    before: float | None
    saved: float | None
    kept_mass: float | None

    @property
    def cross_entropy(self) -> float:
        """Nats a token."""
        return fmean(self.nats)


@dataclass(frozen=True)
class Loss:
    """One cross-entropy above another on the same samples, nats a token, with the paired standard error."""

    delta: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %."""
        return self.delta - 1.96 * self.error, self.delta + 1.96 * self.error


def compare(found: Measurement, vanilla: Measurement) -> Loss:
    """Sample by sample; there are two at least."""
    differences = [nats - own for nats, own in zip(found.nats, vanilla.nats, strict=True)]
    return Loss(fmean(differences), stdev(differences) / len(differences) ** 0.5)


def agreement(found: Measurement, vanilla: Measurement) -> float:
    """The share of tokens for which both like the same token best."""
    pairs = zip(found.greedy, vanilla.greedy, strict=True)
    same = [one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)]
    return fmean(same)


def check_rows(since: dict[str, Any], rows: int) -> None:
    """Raise ValueError where the steps counted in `since_switch` had not as many rows as asked for."""
    counted = since["rows"] / since["layer_steps"]
    if not LEAST_ROWS * rows <= counted <= rows * 1.01:
        raise ValueError(
            f"{counted:.1f} rows a step in place of {rows}; allowed is a server of one replica without other traffic "
            "and with --max-running-requests that lets them decode together"
        )


Measure = Callable[[dict[str, Any], int, str], Measurement]
"""What decodes a part of the samples under a policy, so many at a time."""


def hash_asked(*asked: Any) -> str:
    """A digest of what a trace is measured of: model, layers, samples, what is counted, and the figures."""
    return hashlib.sha256(orjson.dumps([*asked, [one.name for one in fields(Measurement)]])).hexdigest()


class Bench:
    """Has plans measured, each once: not what is in the trace, a file of JSON lines, as measured of the same `asked`.
    Raises what `measure` does.
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
        """What was run, known or not."""

    def run(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """What a policy does on a part of the samples, of which `batch` decode together."""
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
