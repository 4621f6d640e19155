"""XShare 6.3: requests of four domains in one batch lose no more quality than batches of one domain."""

from dataclasses import asdict

import torch
from matplotlib.figure import Figure

from benchmark.quality.findings.finding import Finding, Study, Verdict
from benchmark.quality.measure import Loss, compare_loss

PUBLISHED = tuple(
    f"xshare:{keys}"
    for keys in ("k0=1,add=0,add_per_request=4", "k0=1,add=0,add_per_request=5", "k0=2,add=0,add_per_request=4")
)
POLICIES = ("vanilla", *PUBLISHED, *(f"xshare:k0=1,add={add}" for add in (8, 16, 24)))


def find_mixed_batch(study: Study) -> Finding:
    """The same sequences verified under the same policies, in batches of one domain and of all."""
    one = {policy: study.verify(policy) for policy in POLICIES}
    mixed = {policy: study.verify(policy, mixed=True) for policy in POLICIES}
    nats = {policy: _unmix(run.nats, study) for policy, run in mixed.items()}
    losses = {
        policy: (
            compare_loss(one[policy].nats, one["vanilla"].nats),
            compare_loss(nats[policy], nats["vanilla"]),
            compare_loss(nats[policy], one[policy].nats),
        )
        for policy in POLICIES
    }
    active = {policy: (one[policy].active, mixed[policy].active) for policy in POLICIES}
    rows = [
        [policy, *(f"{experts:.1f}" for experts in active[policy]), *map(str, losses[policy])] for policy in POLICIES
    ]
    return Finding(
        name="mixed-batch",
        title=f"Verifying {study.layout} in batches of one domain and of all",
        source="XShare, section 6.3",
        headings=["policy", "experts", "mixed: experts", "mnats", "mixed: mnats", "mixed over one domain, mnats"],
        rows=rows,
        verdicts=_judge(active, losses),
        figure=_plot(active, losses),
        numbers=[
            {"policy": policy, "active": active[policy], "loss": [asdict(loss) for loss in losses[policy]]}
            for policy in POLICIES
        ],
    )


def _unmix(nats: torch.Tensor, study: Study) -> torch.Tensor:
    """Rows of a mixed run in the order of the others."""
    return torch.empty_like(nats).index_copy_(0, torch.tensor(study.sequences.mixing()), nats)


def _judge(active: dict[str, tuple[float, float]], losses: dict[str, tuple[Loss, Loss, Loss]]) -> list[Verdict]:
    worse = [policy for policy in PUBLISHED if losses[policy][2].is_lower is False]
    baseline = active["vanilla"][1]
    saved = {policy: 1 - active[policy][1] / baseline for policy in PUBLISHED}
    return [
        Verdict(
            "budgets a request keep their quality when the domains of a batch differ",
            "mixed over one domain, mnats: " + ", ".join(str(losses[policy][2]) for policy in PUBLISHED),
            not worse,
        ),
        Verdict(
            "and still wake fewer experts than vanilla",
            ", ".join(f"{share:.0%} fewer" for share in saved.values()),
            min(saved.values()) > 0,
        ),
    ]


def _plot(active: dict[str, tuple[float, float]], losses: dict[str, tuple[Loss, Loss, Loss]]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for index, label in enumerate(("one domain", "mixed")):
        points = [(active[policy][index], losses[policy][index]) for policy in POLICIES]
        experts, deltas = [x for x, _ in points], [loss.delta * 1000 for _, loss in points]
        axis.errorbar(experts, deltas, yerr=[loss.error * 1000 for _, loss in points], fmt="o", capsize=2, label=label)
    for policy in POLICIES:
        x, y = zip(*((active[policy][index], losses[policy][index].delta * 1000) for index in (0, 1)), strict=True)
        axis.annotate("", (x[1], y[1]), (x[0], y[0]), arrowprops={"arrowstyle": "->", "color": "grey"})
        axis.annotate(policy.removeprefix("xshare:"), (x[1], y[1]), (3, 3), textcoords="offset points", fontsize=7)
    axis.set(xlabel="active experts a layer and step", ylabel="cross-entropy above vanilla's, millinats")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure
