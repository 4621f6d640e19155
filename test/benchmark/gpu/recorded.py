"""Made-up records of every experiment: figures that can be checked by hand, which no machine has measured."""

from pathlib import Path
from typing import Any

from common.made_up import make_point, make_series

from benchmark.common.evidence import Evidence
from benchmark.common.record import Record

# 34 us + 2 us an expert, one expert being 9,437,184 bytes.
LAYER: dict[str, dict[str, Any]] = {
    "copy": {"gb_per_s": 4000.0},
    **{
        f"qwen3-30b-a3b/active={n}": {"active": n, "us": 34.0 + 2.0 * n, "expert_bytes": 9437184}
        for n in (8, 24, 48, 64, 128)
    },
    "qwen3-30b-a3b/off": {"active": 49.0, "us": 132.0},
    "qwen3-30b-a3b/oea:k0=3": {"active": 24.0, "us": 79.2},
    "qwen3-30b-a3b/oea:k0=5": {"active": 35.0, "us": 105.6},
    "gpt-oss-20b/off": {"active": 20.0, "us": 100.0},
    "gpt-oss-20b/oea:k0=3": {"active": 16.0, "us": 90.0},
}


def served(
    off: float, on: float, accept_length: float | None = None, swings: tuple[float, ...] = (0.0, 0.0)
) -> dict[str, Any]:
    """A point: tokens a second of two variants, the second's changed by a swing in each round; by default two alike."""
    evidence = Evidence(80.0, 40.0, 0.9, 8)
    policy = make_series("xshare", [on + swing for swing in swings], evidence, accept_length)
    return make_point([make_series("off", [off] * len(swings)), policy])


def write_record(folder: Path, experiment: str, points: dict[str, dict[str, Any]]) -> Record:
    """A record on disk with these points."""
    record = Record(folder, experiment, ["made up"])
    for key, point in points.items():
        record.add(key, **point)
    return record
