"""Words and verdicts that several studies share."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from benchmark.quality.findings.ladder import Gap
from benchmark.quality.measure import Loss


def is_better(losses: Sequence[Loss]) -> bool | None:
    """Where most of the differences are measurably below 0, or above; None where neither are."""
    votes = [loss.is_lower for loss in losses]
    for side in (True, False):
        if sum(vote is side for vote in votes) > len(votes) / 2:
            return side
    return None


def is_no_better(losses: Sequence[Loss]) -> bool | None:
    """Whether hardly any difference is measurably below 0, at most one in eight; False where most are."""
    better = sum(loss.is_lower is True for loss in losses)
    if not losses or len(losses) / 8 < better <= len(losses) / 2:
        return None
    return better <= len(losses) / 8


def are_even(losses: Sequence[Loss]) -> bool | None:
    """Whether all differences are within error; None where most are."""
    even = sum(loss.is_lower is None for loss in losses)
    return True if even == len(losses) else None if even > len(losses) / 2 else False


def below_curve(found: tuple[float, Loss], rungs: Sequence[tuple[float, Loss]], error: float) -> Loss | None:
    """How far (active experts, loss) lies from the curve through such rungs, with this error: below 0 where it is
    better. Between two rungs whose losses are above 0 the curve is geometric, since losses fall by shares of
    themselves: a straight line would lie above it, the further the rungs are apart, and flatter what lies between.
    """
    experts, loss = found
    for (few, high), (many, low) in pairwise(sorted(rungs, key=lambda rung: rung[0])):
        if few <= experts <= many:
            share = (experts - few) / max(many - few, 1e-9)
            line = high.delta + share * (low.delta - high.delta)
            if min(high.delta, low.delta) > 0:
                line = high.delta ** (1 - share) * low.delta**share
            return Loss(loss.cross_entropy, loss.delta - line, error)
    return None


def tally(losses: Sequence[Loss]) -> str:
    """How many are measurably better, worse, neither; and their range in millinats."""
    better, worse = (sum(loss.is_lower is side for loss in losses) for side in (True, False))
    if not losses:
        return "nothing to compare"
    low, high = (pick(loss.delta for loss in losses) * 1000 for pick in (min, max))
    even = len(losses) - better - worse
    return f"of {len(losses)} {better} better, {worse} worse, {even} within error: {low:+.1f} to {high:+.1f} mnats"


def join(losses: Iterable[Loss]) -> str:
    """One after another, in millinats."""
    return ", ".join(str(loss) for loss in losses)


def losses_of(gaps: Iterable[Gap | None]) -> list[Loss]:
    """Of the gaps that are within their ladder."""
    return [gap.loss for gap in gaps if gap is not None]
