"""The counts between two reads of the counters, and the stage's part of the decode log line."""

from dataclasses import dataclass

REASONS = ("vanilla", "phase", "min_rows", "max_rows", "unchanged", "override")
"""The reasons why a layer has no plan. If no layer has a plan, the step is counted under the first of these reasons
that applies to some layer. Each of the first four reasons applies to all layers or to none. "override" is last, because
it may apply to a few layers only.
"""
OUTCOMES = ("policy", "observed", "prefill", *REASONS, "no_context")
"""The possible outcomes of a forward of the target model. Forwards are counted by their outcome."""


@dataclass(frozen=True)
class Interval:
    """The counts since the last report.

    All fields are totals over layers and steps, except `outcomes`, which counts forwards. The totals of page-ins are
    None without paged experts. The totals of the fullest rank are None without expert parallelism.
    """

    layer_steps: int
    experts_before: int
    experts_after: int
    kept_mass: float
    rows: int
    rescued: int
    outcomes: dict[str, int]
    exact_rows: int = 0
    page_ins_before: int | None = None
    """Experts that vanilla routing would have paged in, because they were not loaded."""
    page_ins: int | None = None
    fullest_before: int | None = None
    """The active experts on the expert-parallel rank that has the most of them, under vanilla routing."""
    fullest_after: int | None = None

    def mean(self, total: str) -> float | None:
        """Return the mean of the field `total` over layers and steps, or None if there is no step or no total."""
        value = getattr(self, total)
        return value / self.layer_steps if self.layer_steps and value is not None else None

    @property
    def mean_kept_mass(self) -> float | None:
        """The mean of `Selection.kept_mass` over live rows, layers and steps, or None if there was no live row."""
        return self.kept_mass / self.rows if self.rows else None

    @property
    def others_kept_mass(self) -> float | None:
        """The mean kept mass of the rows that are not exact, or None if all rows are exact.

        Exact rows keep all of their mass.
        """
        others = self.rows - self.exact_rows
        return (self.kept_mass - self.exact_rows) / others if others else None


def format_log(interval: Interval) -> str:
    """Return the stage's part of the decode log line."""
    selecting = {name: count for name, count in interval.outcomes.items() if count and name in ("policy", "observed")}
    vanilla = [f"{name} {count}" for name, count in interval.outcomes.items() if count and name not in selecting]
    steps = ", ".join(f"{name} steps: {count}" for name, count in (selecting or {"policy": 0}).items())
    text = f", {steps}, vanilla steps: {' '.join(vanilla) or 0}"
    if interval.layer_steps:
        observes = "observed" in selecting
        means = _format_means(interval, observes, "active experts", "experts_before", "experts_after")
        means += _format_means(interval, observes, "page-ins", "page_ins_before", "page_ins")
        other = f"batch size: {interval.mean('rows'):.1f}" if observes else f"kept mass: {interval.mean_kept_mass:.4f}"
        text = f"{means}, {other}{text}"
    if interval.exact_rows:
        text += f", exact rows: {interval.exact_rows / interval.rows:.1%}"
        mass = interval.others_kept_mass
        text += "" if mass is None else f", kept mass of the others: {mass:.4f}"
    text += f", rescued: {interval.rescued}" if interval.rescued else ""
    if interval.fullest_before:
        what = "active experts of the fullest rank"
        text += _format_means(interval, "observed" in selecting, what, "fullest_before", "fullest_after")
    return text


def _format_means(interval: Interval, observes: bool, what: str, before: str, after: str) -> str:
    """Return a text with the means of two totals. If the server `observes`, the text has only the first mean.

    The text is empty if there was no step, or if the server does not count these totals.
    """
    means = [interval.mean(total) for total in (before, after)[: 1 if observes else 2]]
    return "" if None in means else f", {what}: {' -> '.join(f'{mean:.1f}' for mean in means)}"
