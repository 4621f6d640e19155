"""Series and points of a record that nobody has measured: figures that can be checked by hand."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series, Workload
from benchmark.common.variant import Variant, parse_variant

NEVER = Evidence(None, None, None, 0)
"""Of a server on which no policy has acted."""


def make_series(
    variant: str | Variant, speeds: Sequence[float], evidence: Evidence = NEVER, accepted: float | None = None
) -> Series:
    """A round at each of these speeds in tokens a second, as of one request alone."""
    rest = {"median_ttft_ms": 5.0, "accept_length": accepted}
    results = [{"output_throughput": speed, "median_tpot_ms": 1000 / speed, **rest} for speed in speeds]
    variant = parse_variant(variant) if isinstance(variant, str) else variant
    return Series(variant, ["launch"], results, [evidence] * len(results))


def make_point(series: Sequence[Series], model: str = "model", **workload: Any) -> dict[str, Any]:
    """What a record holds of them."""
    asked = Workload(Path(model), Path("texts"), rounds=len(series[0].results), **workload)
    return {"workload": asdict(asked), "series": [asdict(one) for one in series]}
