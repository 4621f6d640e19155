"""Comparisons of active experts at equal loss.

A ladder is a list of settings of one policy that differ only in their budget. The number of experts at a given loss is
interpolated between two settings of a ladder.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from benchmark.common.interval import LEAST

DRAWS = 400
"""The number of bootstrap samples."""
FOUND = 0.9
"""The share of bootstrap samples that must have a value. A sample has none if the loss is outside the ladder."""
Curve = Sequence[tuple[float, float]]
"""The (active experts, loss) of each setting in a ladder, sorted by active experts."""


def experts_for(loss: float, curve: Curve) -> float | None:
    """Return the number of experts at which the curve has this loss, or None if the loss is outside the curve."""
    for (few, high), (many, low) in pairwise(curve):
        if high >= loss >= low and high > low:
            return few + (high - loss) / (high - low) * (many - few)
    return None


def find_interval(
    losses: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float | None]
) -> tuple[float, float] | None:
    """Return a 95 % bootstrap interval of a statistic.

    `losses` has the shape [settings, batches]. Each bootstrap sample draws batches with replacement, the same ones for
    all settings. `statistic` receives the mean loss of each setting. Return None for fewer than `LEAST` batches, or if
    the statistic is None for too many samples.
    """
    values = np.array(losses)
    batches = values.shape[1]
    if batches < LEAST:
        return None
    rows = np.random.default_rng(0).integers(batches, size=(DRAWS, batches))
    drawn = (statistic(means) for means in values[:, rows].mean(2).T.tolist())
    found = [one for one in drawn if one is not None]
    if len(found) < FOUND * DRAWS:
        return None
    lower, upper = np.quantile(found, (0.025, 0.975))
    return float(lower), float(upper)


def format_share(share: float, interval: Sequence[float] | None, digits: int = 0) -> str:
    """Format a share in percent, followed by its interval if the interval is known."""
    text = f"{share:+.{digits}%}"
    return text if interval is None else f"{text} [{', '.join(f'{one:+.{digits}%}' for one in interval)}]"
