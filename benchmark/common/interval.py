"""95 % confidence intervals from Student's t-distribution, for small numbers of measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import NormalDist, fmean, median, stdev

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles for 1 to 10 degrees of freedom. Source: NIST/SEMATECH e-Handbook, section 1.3.6.7.2."""
NORMAL = NormalDist().inv_cdf(0.975)
LEAST = 5
"""The minimum number of rounds or batches behind a headline result."""


@dataclass(frozen=True)
class Spread:
    """The mean, its 95 % t-interval and the median. All four numbers are equal for a single round."""

    mean: float
    lower: float
    upper: float
    median: float


def find_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of the t-distribution, or infinity if `freedom` is below 1.

    Above 10 degrees of freedom, the result is the expansion 26.7.5 of Abramowitz and Stegun, with an error below
    0.0005.
    """
    if freedom < 1:
        return inf
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NORMAL
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def find_margin(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % t-interval, or None for a single value."""
    count = len(values)
    return find_quantile(count - 1) * stdev(values) / count**0.5 if count > 1 else None


def spread(values: Sequence[float]) -> Spread:
    """Compute the mean, the 95 % t-interval and the median."""
    mean, margin = fmean(values), find_margin(values) or 0.0
    return Spread(mean, mean - margin, mean + margin, median(values))


def format_spread(value: Spread, digits: int) -> str:
    """Format the mean and its interval. A single round has no interval."""
    mean, lower, upper = (f"{one:.{digits}f}" for one in (value.mean, value.lower, value.upper))
    return mean if value.lower == value.upper == value.mean else f"{mean} [{lower}, {upper}]"


def format_rounds(values: Sequence[float], digits: int) -> str:
    """Format the values of all rounds as a list separated by commas."""
    return ", ".join(f"{value:.{digits}f}" for value in values)
