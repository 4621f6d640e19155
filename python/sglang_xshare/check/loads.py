"""Active experts a layer and step as they are given, and what is assumed where nobody knows them."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

COMMON = 0.47
"""Share of the logits' variance in common, so that 49 of 128 experts are active as in OEA's Qwen3-30B-A3B, 16 rows."""
ASSUMPTIONS = {"agreeing": COMMON, "independent": 0.0}
MOST_ROWS = 16_384
"""Rows of a step that are drawn: at 256 experts 0.6 GB, and 2.6 s of a CPU core a layer."""


@dataclass(frozen=True)
class Load:
    """Of a MoE layer and step: `active` experts, the `fullest` rank's, and those paged in, None where nobody knows."""

    active: float
    fullest: float
    page_ins: float | None = None


@dataclass(frozen=True)
class Drawn:
    """Means over layers: the load by the model's routing and by the policy, and the kept mass, None where unknown."""

    before: Load
    after: Load
    kept_mass: float | None


def give(before: float, after: float, kept_mass: float | None = None) -> Drawn:
    """Experts as somebody knows them."""
    return Drawn(Load(before, before), Load(after, after), kept_mass)


@dataclass(frozen=True)
class Trace:
    """A file of `--expert-policy-trace`: its lines."""

    file: Path
    lines: list[dict[str, Any]]


def read_trace(file: Path) -> Trace:
    """Raises ValueError for a file that is none."""
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if not all({"batch_size", "experts_before"} <= line.keys() for line in lines):
            raise ValueError("lines without batch_size")
        return Trace(file, lines)
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"not readable ({error})"
        raise ValueError(f"--trace {file}: {reason}; allowed is a file of --expert-policy-trace") from None


def find_steps(trace: Trace, rows: int, policy: str | None) -> tuple[Drawn, bool]:
    """(means over the steps of as many live rows, whether they are `policy`'s): a file of `observe` has what its plan
    spelt `policy` would have kept, any other what its server's policy kept. Raises ValueError where the file has none.
    """
    sizes = sorted({line["batch_size"] for line in trace.lines})
    lines = [line for line in trace.lines if line["batch_size"] == rows]
    try:
        observed = sorted({name for line in lines for name in line.get("plans", ())})
        found = policy in observed
        kept = [line["plans"][policy] if found else line for line in lines]
        counts = [(line["experts_before"], part["experts_after"]) for line, part in zip(lines, kept, strict=True)]
        masses = [part["kept_mass"] for part in kept if part.get("kept_mass") is not None]
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"not readable ({error})"
        raise ValueError(f"--trace {trace.file}: {reason}; allowed is a file of --expert-policy-trace") from None
    if not counts:
        raise ValueError(f"--trace {trace.file}: no step of {rows} rows; it has {', '.join(map(str, sizes)) or 'none'}")
    if observed and not found:
        raise ValueError(f"{policy}: not among the plans that --trace {trace.file} observed: {', '.join(observed)}")
    before, after = (fmean(column) for column in zip(*counts, strict=True))
    return give(before, after, fmean(masses) if masses else None), found
