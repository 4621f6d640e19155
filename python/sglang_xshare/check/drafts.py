"""Warnings about draft tokens that would make a server slower. They use the estimated time of a step."""

from collections.abc import Mapping

from ..policies.schedule import Schedule
from .estimate import COMMON, Step, estimate_step
from .weights import divide

CHANCE = 0.75
"""The assumed chance that a draft token is accepted if all earlier draft tokens of the request were accepted.

The value is that of the draft model in docs/guide.md.
"""
FLAG = "--speculative-num-draft-tokens"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The numbers of draft tokens that are compared with the server's number."""


def list_warnings(step: Step, schedule: Schedule | None, bandwidth: float) -> list[str]:
    """Return a list with one warning if the server would be faster without draft tokens.

    Otherwise return []. Also return [] if the draft depth is adaptive. `schedule` is the server's policy, or None for
    the model's own routing. `bandwidth` is in GB/s.
    """
    weights, flags, batch = step.weights, step.flags, step.batch
    if flags.draft_tokens <= 1 or flags.speculative_adaptive:
        return []
    from .active import draw_loads

    rank, seconds = divide(weights, flags), {}
    for width in sorted({flags.draft_tokens, *(one for one in WIDTHS if one < flags.draft_tokens)}):
        loads = draw_loads(schedule, weights.model, batch * width, width, COMMON, flags.ep_size)
        _, seconds[width] = estimate_step(rank, loads["fullest_rank_experts"][1], step.cached, bandwidth * 1e9)
    line = describe(seconds, batch)
    return [] if line is None else [line]


def describe(seconds: Mapping[int, float], batch: int) -> str | None:
    """Return a warning if the server's draft tokens give fewer tokens per second than no drafts, otherwise None.

    `seconds` contains the time of a step for each number of draft tokens. The largest number of draft tokens is the
    server's. The number 1 means that a step verifies no drafts. The time of the draft model is not counted.
    """
    asked = max(seconds)
    speeds = {width: expect(width) / taken for width, taken in seconds.items()}
    if speeds[asked] >= speeds[1]:
        return None
    best = max(sorted(speeds), key=speeds.__getitem__)
    then = "no drafts at all would give" if best == 1 else f"{best} would give"
    return (
        f"{FLAG} {asked} cannot pay with --batch {batch} by this estimate: a step takes {seconds[asked] * 1e3:.1f} ms "
        f"for {expect(asked):.1f} tokens a request (without drafts: {seconds[1] * 1e3:.1f} ms for 1) if a draft is "
        f"accepted with chance {CHANCE}; {then} the most tokens per second"
    )


def expect(width: int) -> float:
    """Return the mean number of tokens that a request gets from a step with `width` draft tokens."""
    return sum(CHANCE**place for place in range(width))
