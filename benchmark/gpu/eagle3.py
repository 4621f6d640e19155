"""Experiment `eagle3`: speculative decoding, four requests of three draft tokens each, policy off and on.

The draft has the shape of a real one and random weights, so nothing it drafts would be accepted: upstream simulates the
acceptance, and takes the draft's own tokens, since a fixed token would give all rows the same experts. The last token
of a verify step is drawn (`dummy_server.draw_bonus_tokens`): with the likeliest one, 16 rows had 16.3 experts active.
Verification is greedy: its kernels for drawn tokens run on no stand-in, and simulated acceptance discards their answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.comparison import is_measured
from benchmark.common.record import Record
from benchmark.common.variant import OFF, parse_variant
from benchmark.gpu import memory
from benchmark.gpu.checks import choose_parts
from benchmark.gpu.models import write_model
from benchmark.gpu.serving import Gain, Point, make_toggled, measure_rounds
from benchmark.gpu.table import Row

MODEL, DRAFT = "gpt-oss-120b", "gpt-oss-120b-eagle3"
POLICY = "xshare:k0=1,add=0,add_per_request=4"
VARIANTS = (OFF, POLICY)
BATCH = 4
ACCEPTED = 3  # tokens a verification step, of 4 possible
ENV = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}
# Percent: XShare, section 6.2, publishes 13 to 14 with this configuration.
GAIN_BAR = 14.0


def measure(record: Record, parts: Sequence[str]) -> None:
    """Measure, unless the record has it."""
    choose_parts("eagle3", parts)
    if is_measured(record, POLICY):
        return
    variants = [parse_variant(text) for text in VARIANTS]
    model = memory.fit_model(record, "eagle3", MODEL, draft=DRAFT)
    if model is None:
        return
    with make_toggled(model, variants[1], draft_args(), ENV) as server:
        measure_rounds(record, model, [Point(POLICY, variants, BATCH)], [server, server], temperature=0.0)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The policy's gain, and what was cut for it."""
    found = memory.rows(points, "eagle3")
    if POLICY not in points:
        return found
    gain = Gain.read(points[POLICY])
    accepted = gain.on.accept_length
    found.append(gain.row(f"{gain.model}, {POLICY}, batch {BATCH}", GAIN_BAR, MODEL))
    # Without it, the gain would be that of some other workload.
    measured = "-" if accepted is None else f"{accepted:.2f} tokens a step"
    simulated = accepted is not None and abs(accepted - ACCEPTED) < 0.25
    return [*found, Row("simulated acceptance", measured, f"{ACCEPTED} tokens a step", simulated)]


def draft_args() -> list[str]:
    """The flags of a chain of three draft tokens, and of no more graphs than four requests ask for."""
    return [
        *("--max-running-requests", str(2 * BATCH)),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(write_model(DRAFT))),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ]
