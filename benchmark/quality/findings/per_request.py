"""XShare Figure 5: with drafts, budgets a request (Algorithm 4) beat one budget for the batch (Algorithm 2)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Study, Verdict
from benchmark.quality.findings.ladder import Gap, measure_gap
from benchmark.quality.measure import Decoded, agreement, compare_loss

# Every budget: a line between distant rungs would lie above the curve, and flatter what is compared with it. By every
# second budget it would be by 0.5 mnats on average and 2.4 at add = 1, where errors are 0.5 to 2.
BY_BATCH = tuple(f"xshare:k0=1,add={add}" for add in range(25))
BY_REQUEST = tuple(f"xshare:k0=1,add=0,add_per_request={add}" for add in (1, 2, 3, 4, 5, 6, 8))
PUBLISHED = BY_REQUEST[3:5]
NO_WARM_UP = ("xshare:k0=0,add=16,add_per_request=4", "xshare:k0=0,add=0,add_per_request=8")
UNTOLD = {policy for index, policy in enumerate(BY_BATCH) if index % 4}  # left to the record and the figure
FAMILIES = {
    "Algorithm 2 (batch)": BY_BATCH,
    "Algorithm 4 (request)": BY_REQUEST,
    "Algorithm 4 without warm-up": NO_WARM_UP,
}


def find_per_request(study: Study) -> Finding:
    """Verification of drafts in batches of one domain; compared at equal active experts by interpolation.

    `accepted` stands in for acceptance length: the text is the draft, of which the leading tokens that are the most
    likely ones are kept, and one more.
    """
    vanilla = study.verify()
    families = {name: {policy: study.verify(policy) for policy in policies} for name, policies in FAMILIES.items()}
    rungs = list(families["Algorithm 2 (batch)"].values())
    runs = {"vanilla": vanilla} | {policy: run for family in families.values() for policy, run in family.items()}
    gaps = {policy: measure_gap(runs[policy], rungs, vanilla) for policy in (*BY_REQUEST, *NO_WARM_UP)}
    return Finding(
        name="per-request",
        title=f"Verifying {study.layout} in batches of one domain",
        source="XShare, Figure 5 and Table 4",
        headings=[
            "policy",
            "experts",
            "kept mass",
            "mnats",
            "greedy same",
            "accepted",
            "mnats over Alg. 2",
            "mass over Alg. 2",
        ],
        rows=[
            [name, *_cells(run, vanilla), *_gap_cells(gaps.get(name))]
            for name, run in runs.items()
            if name not in UNTOLD
        ],
        verdicts=_judge(gaps, runs),
        figure=_plot(families, vanilla),
        numbers=[{"policy": policy, **_numbers(run, vanilla, gaps.get(policy))} for policy, run in runs.items()],
    )


def _numbers(run: Decoded, vanilla: Decoded, gap: Gap | None) -> dict[str, Any]:
    return {
        "active_experts": run.active,
        "kept_mass": run.kept_mass,
        "loss": asdict(compare_loss(run.nats, vanilla.nats)),
        "agreement": agreement(run, vanilla),
        "accepted": run.accepted,
        "over_algorithm_2": None if gap is None else asdict(gap),
    }


def _cells(run: Decoded, vanilla: Decoded) -> list[str]:
    loss = str(compare_loss(run.nats, vanilla.nats))
    return [f"{run.active:.1f}", f"{run.kept_mass:.3f}", loss, f"{agreement(run, vanilla):.1%}", f"{run.accepted:.2f}"]


def _gap_cells(gap: Gap | None) -> list[str]:
    return ["", ""] if gap is None else [str(gap.loss), f"{gap.kept_mass:+.4f}"]


def _judge(gaps: dict[str, Gap | None], runs: dict[str, Decoded]) -> list[Verdict]:
    by_request = [gap for policy in BY_REQUEST if (gap := gaps[policy])]
    kept = [runs[policy].kept_mass for policy in PUBLISHED]
    without = [gap for policy in NO_WARM_UP if (gap := gaps[policy])]
    return [
        Verdict(
            "at equal experts, Algorithm 4 loses less than Algorithm 2",
            _tally(by_request),
            _majority([gap.loss.is_lower for gap in by_request]),
        ),
        Verdict(
            "4 or 5 experts a request capture most of the gating mass",
            f"{kept[0]:.3f}, {kept[1]:.3f}; over Algorithm 2 at equal experts "
            f"{_range([gap.kept_mass for gap in by_request], '+.4f')}",
            min(kept) > 0.9,
        ),
        Verdict(
            "without warm-up quality degrades severely",
            _tally(without),
            _majority([None if gap.loss.is_lower is None else not gap.loss.is_lower for gap in without]),
        ),
    ]


def _tally(gaps: Sequence[Gap]) -> str:
    better, worse = (sum(gap.loss.is_lower is side for gap in gaps) for side in (True, False))
    losses = _range([gap.loss.delta * 1000 for gap in gaps], "+.1f")
    even = len(gaps) - better - worse
    return f"of {len(gaps)} settings {better} better, {worse} worse, {even} within error: {losses} mnats"


def _range(values: Sequence[float], digits: str) -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}" if values else "nothing to compare"


def _majority(votes: Sequence[bool | None]) -> bool | None:
    """Where more than half of the votes agree; None where neither side has that many."""
    for side in (True, False):
        if sum(vote is side for vote in votes) > len(votes) / 2:
            return side
    return None


def _plot(families: dict[str, dict[str, Decoded]], vanilla: Decoded) -> Figure:
    panels = {
        "kept mass": lambda run: run.kept_mass,
        "cross-entropy above vanilla's, millinats": lambda run: compare_loss(run.nats, vanilla.nats).delta * 1000,
        "greedy tokens equal to vanilla's": lambda run: agreement(run, vanilla),
    }
    title = "Verifying drafts: one budget for the batch against budgets a request, at equal active experts"
    figure, (axes,) = make_figure(title, 1, len(panels))
    for axis, (label, value) in zip(axes, panels.items(), strict=True):
        for name, runs in families.items():
            points = sorted((run.active, value(run)) for run in runs.values())
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=name)
        axis.set(xlabel="active experts a layer and step", ylabel=label)
    return figure
