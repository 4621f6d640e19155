"""95 % confidence intervals of few measurements, by Student's t-distribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import NormalDist, fmean, median, stdev

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles at 1 to 10 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2."""
NORMAL = NormalDist().inv_cdf(0.975)
LEAST = 5
"""The fewest rounds or batches that an interval of a headline figure must cover."""


@dataclass(frozen=True)
class Spread:
    """The mean of some rounds, the bounds of its 95 % t-interval, and the median; equal for a single round."""

    mean: float
    lower: float
    upper: float
    median: float


def find_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of the t-distribution; infinite without a degree of freedom.

    Above 10 degrees of freedom the expansion of Abramowitz and Stegun, 26.7.5, is exact to 0.0005.
    """
    if freedom < 1:
        return inf
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    z = NORMAL
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def find_margin(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % t-interval of the mean; None for a single value."""
    count = len(values)
    return find_quantile(count - 1) * stdev(values) / count**0.5 if count > 1 else None


def spread(values: Sequence[float]) -> Spread:
    """Return the mean of `values` with its interval."""
    mean, margin = fmean(values), find_margin(values) or 0.0
    return Spread(mean, mean - margin, mean + margin, median(values))


def format_spread(value: Spread, digits: int) -> str:
    """Return the mean and its interval; for a single round the mean alone."""
    mean, lower, upper = (f"{one:.{digits}f}" for one in (value.mean, value.lower, value.upper))
    return mean if value.lower == value.upper == value.mean else f"{mean} [{lower}, {upper}]"


def format_rounds(values: Sequence[float], digits: int) -> str:
    """Return the value of each round, in the order measured."""
    return ", ".join(f"{value:.{digits}f}" for value in values)
