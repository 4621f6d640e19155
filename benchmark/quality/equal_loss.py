"""Experts at equal loss, on the line between two settings of a ladder, and the interval of such a share."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from benchmark.common.interval import LEAST

DRAWS = 400
"""Draws of the batches, with replacement."""
FOUND = 0.9
"""The share of draws that must have a value: without one, a loss lies beyond the ladder's settings."""
Curve = Sequence[tuple[float, float]]
"""(active experts, loss) of the settings of a ladder, fewest experts first."""


def experts_for(loss: float, curve: Curve) -> float | None:
    """Return the experts at which the line through `curve` has this loss; None beyond its settings."""
    for (few, high), (many, low) in pairwise(curve):
        if high >= loss >= low and high > low:
            return few + (high - loss) / (high - low) * (many - few)
    return None


def find_interval(
    losses: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float | None]
) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a `statistic` of the mean losses, one a setting.

    `losses` are [settings, batches], of the same batches, which are drawn with replacement, for all settings alike.
    None below `LEAST` batches, or if too few draws have a value.
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
    """Return a share in percent, with its interval if there is one."""
    text = f"{share:+.{digits}%}"
    return text if interval is None else f"{text} [{', '.join(f'{one:+.{digits}%}' for one in interval)}]"
