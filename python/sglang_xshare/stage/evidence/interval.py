"""What a policy did in the steps between two looks at the counters, and its part of the decode log line."""

from dataclasses import dataclass

# "policy", "observed" under `observe`, or why a forward of the target model stayed vanilla.
OUTCOMES = (
    "policy",
    "observed",
    "prefill",
    "phase",
    "min_rows",
    "max_rows",
    "override",
    "unchanged",
    "no_context",
    "vanilla",
)


@dataclass(frozen=True)
class Interval:
    """What happened since the last report. Totals over layers and steps; `outcomes` counts forwards."""

    layer_steps: int
    experts_before: int
    experts_after: int
    kept_mass: float
    rows: int
    rescued: int
    outcomes: dict[str, int]
    exact_rows: int = 0
    page_ins_before: int | None = None
    """What vanilla routing would have paged in, each time from the experts that were loaded; None without paging."""
    page_ins: int | None = None
    exceeded: int = 0
    """Layers' steps in which more experts were active than slots, where that had been ruled out."""

    @property
    def mean_before(self) -> float:
        """Mean active experts a layer and step under vanilla routing."""
        return self.experts_before / max(self.layer_steps, 1)

    @property
    def mean_after(self) -> float:
        """Mean active experts a layer and step."""
        return self.experts_after / max(self.layer_steps, 1)

    @property
    def mean_page_ins_before(self) -> float | None:
        """Mean experts a layer and step that vanilla routing would have paged in; None without paging."""
        return None if self.page_ins_before is None else self.page_ins_before / max(self.layer_steps, 1)

    @property
    def mean_page_ins(self) -> float | None:
        """Mean experts paged in a layer and step; None without paging."""
        return None if self.page_ins is None else self.page_ins / max(self.layer_steps, 1)

    @property
    def mean_kept_mass(self) -> float:
        """Kept mass of a live row (`Selection.kept_mass`), averaged over rows, layers and steps."""
        return self.kept_mass / max(self.rows, 1)

    @property
    def others_kept_mass(self) -> float | None:
        """The same of rows that are not exact, for an exact one keeps all; None where all are."""
        others = self.rows - self.exact_rows
        return (self.kept_mass - self.exact_rows) / others if others else None


def format_log(interval: Interval) -> str:
    """The stage's part of the decode log line."""
    selecting = {name: count for name, count in interval.outcomes.items() if count and name in ("policy", "observed")}
    vanilla = [f"{name} {count}" for name, count in interval.outcomes.items() if count and name not in selecting]
    steps = ", ".join(f"{name} steps: {count}" for name, count in (selecting or {"policy": 0}).items())
    text = f", {steps}, vanilla steps: {' '.join(vanilla) or 0}"
    if "observed" in selecting:
        experts = f"active experts: {interval.mean_before:.1f}"
        if interval.mean_page_ins_before is not None:
            experts += f", page-ins: {interval.mean_page_ins_before:.1f}"
        text = f", {experts}, batch size: {interval.rows / max(interval.layer_steps, 1):.1f}{text}"
    elif interval.layer_steps:
        experts = f"active experts: {interval.mean_before:.1f} -> {interval.mean_after:.1f}"
        if interval.mean_page_ins is not None:
            experts += f", page-ins: {interval.mean_page_ins_before:.1f} -> {interval.mean_page_ins:.1f}"
        text = f", {experts}, kept mass: {interval.mean_kept_mass:.4f}{text}"
    if interval.exact_rows:
        text += f", exact rows: {interval.exact_rows / interval.rows:.1%}"
        mass = interval.others_kept_mass
        text += "" if mass is None else f", kept mass of the others: {mass:.4f}"
    return text + (f", rescued: {interval.rescued}" if interval.rescued else "")
