"""Experiment `eagle3`: speculative decoding, four requests of three draft tokens each, policy off and on.

The draft has the shape of a real draft and random weights, so none of its tokens would be accepted. Upstream simulates
the acceptance, and takes the draft's own tokens, because a fixed token would give all rows the same experts. The last
token of a verify step is drawn (`dummy_server.draw_bonus_tokens`): with the likeliest token, 16 rows had 16.3 experts
active. Verification is greedy: simulated acceptance discards the answer of the kernels for drawn tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark.common.comparison import Comparison
from benchmark.common.record import Record
from benchmark.gpu.models import write_model
from benchmark.gpu.server import Case, measure_cases
from benchmark.gpu.serving import gain_row
from benchmark.gpu.table import Row

PARTS = ()
MODEL, DRAFT = "gpt-oss-120b", "gpt-oss-120b-eagle3"
POLICY = "xshare:k0=1,add=0,add_per_request=4"
BATCH = 4
ACCEPTED = 3  # tokens a verify step, of 4 possible
ENV = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}
GAIN_BAR = 14.0
"""Percent: XShare, section 6.2, publishes 13 to 14 with this configuration."""


def draft_args() -> list[str]:
    """Return the flags of a chain of three draft tokens, with graphs for the tokens of four requests."""
    return [
        *("--max-running-requests", str(2 * BATCH)),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(write_model(DRAFT))),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ]


CASE = Case(MODEL, (BATCH,), POLICY, args=draft_args, env=ENV, temperature=0.0)


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure the rounds that the record lacks. Return the failure."""
    return measure_cases(record, {"eagle3": CASE})


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the policy's gain, and the acceptance: another acceptance would make it another workload."""
    for point in [point for point in points.values() if "series" in point]:
        comparison = Comparison.read(point)
        accepted = comparison.summaries[1].accept_length
        yield gain_row(comparison, f"{comparison.workload.model.name}, {POLICY}, batch {BATCH}", GAIN_BAR, MODEL)
        measured = "-" if accepted is None else f"{accepted:.2f} tokens a step"
        simulated = accepted is not None and abs(accepted - ACCEPTED) < 0.25
        yield Row("simulated acceptance", measured, f"{ACCEPTED} tokens a step", simulated)
