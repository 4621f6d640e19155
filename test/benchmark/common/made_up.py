"""Series and points of a record that nobody has measured: figures that can be checked by hand."""

from collections.abc import Iterator, Sequence
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


class Rounds:
    """In place of `run_rounds`: rounds on servers that are not there, at 10, 11, ... tokens a second.

    `ran` has (requests at a time, round) in the order of running; a round from `stop` on ends the run.
    """

    def __init__(self, stop: int = 99) -> None:
        self.ran: list[tuple[int, int]] = []
        self.stop = stop

    def __call__(self, workload: Workload, series: Sequence[Series], servers: object) -> Iterator[int]:
        for number in range(len(series[0].results), workload.rounds):
            if number >= self.stop:
                raise KeyboardInterrupt
            self.ran.append((workload.concurrency, number))
            for one in series:
                one.results += make_series("off", [10.0 + number]).results
                one.evidence.append(NEVER)
            yield number
