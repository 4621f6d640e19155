"""The experiment `eagle3`, which measures speculative decoding with and without a policy.

Four requests have three draft tokens each. The draft model has a realistic shape but random weights, so its tokens
would never be accepted. So SGLang simulates the acceptance. It uses the draft model's own tokens, because a fixed token
would give all rows the same experts. The last token of a verify step is random (`dummy_server.draw_bonus_tokens`). With
the likeliest token, 16 rows activated only 16.3 experts. Verification is greedy, because simulated acceptance ignores
the results of the sampling kernels.
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
ACCEPTED = 3  # tokens per verify step; 4 is the maximum, three draft tokens and the target model's own token
ENV = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}
GAIN_BAR = 14.0
"""The expected gain in percent. The XShare paper reports 13 to 14 % for this configuration in section 6.2."""


def draft_args() -> list[str]:
    """Return the server flags for chains of three draft tokens."""
    return [
        *("--max-running-requests", str(2 * BATCH)),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(write_model(DRAFT))),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ]


CASE = Case(MODEL, (BATCH,), POLICY, args=draft_args, env=ENV, temperature=0.0)


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure the rounds that are missing in the record. Return a failure, or None."""
    return measure_cases(record, {"eagle3": CASE})


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the gain of the policy and the accepted length. With another length, the workload would be different."""
    for point in [point for point in points.values() if "series" in point]:
        comparison = Comparison.read(point)
        accepted = comparison.summaries[1].accept_length
        yield gain_row(comparison, f"{comparison.workload.model.name}, {POLICY}, batch {BATCH}", GAIN_BAR, MODEL)
        measured = "-" if accepted is None else f"{accepted:.2f} tokens a step"
        simulated = accepted is not None and abs(accepted - ACCEPTED) < 0.25
        yield Row("simulated acceptance", measured, f"{ACCEPTED} tokens a step", simulated)
