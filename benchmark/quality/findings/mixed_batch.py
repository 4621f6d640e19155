"""XShare 6.3: budgets a request serve requests of four domains in one batch as well as batches of one domain."""

from dataclasses import asdict, dataclass

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Study, Verdict
from benchmark.quality.findings.ladder import Gap, measure_gap
from benchmark.quality.measure import Loss, compare_loss

BY_REQUEST = tuple(
    f"xshare:{keys}"
    for keys in ("k0=1,add=0,add_per_request=4", "k0=1,add=0,add_per_request=5", "k0=2,add=0,add_per_request=4")
)
BY_BATCH = tuple(f"xshare:k0=1,add={add}" for add in (8, 16, 24))
RUNGS = tuple(f"xshare:k0=1,add={add}" for add in range(6, 25))


@dataclass(frozen=True)
class Mixing:
    """A policy in batches of one domain and in mixed ones: active experts a layer and step, and the loss above
    vanilla's in the same batches. `cost` is the loss in mixed batches above that in batches of one domain, `gap` that
    to Algorithm 2 in mixed batches.
    """

    active: float
    mixed_active: float
    loss: Loss
    mixed_loss: Loss
    cost: Loss
    gap: Gap | None


def find_mixed_batch(study: Study) -> Finding:
    """The same sequences verified under the same policies, in batches of one domain and of all."""
    mixings = {policy: _mix(study, policy) for policy in ("vanilla", *BY_REQUEST, *BY_BATCH)}
    return Finding(
        name="mixed-batch",
        title=f"Verifying {study.layout} in batches of one domain and of all",
        source="XShare, section 6.3",
        headings=["policy", "experts", "mixed", "mnats", "mixed", "mixed over one domain", "mixed over Alg. 2"],
        rows=[[policy, *_cells(mixing)] for policy, mixing in mixings.items()],
        verdicts=_judge(mixings),
        figure=_plot(mixings),
        numbers={policy: asdict(mixing) for policy, mixing in mixings.items()},
    )


def _mix(study: Study, policy: str) -> Mixing:
    one, mixed = study.verify(policy), study.verify(policy, mixed=True)
    vanilla, mixed_vanilla = study.verify(), study.verify(mixed=True)
    by_request = policy in BY_REQUEST
    rungs = [study.verify(rung, mixed=True) for rung in RUNGS] if by_request else []
    return Mixing(
        active=one.active,
        mixed_active=mixed.active,
        loss=compare_loss(one.nats, vanilla.nats),
        mixed_loss=compare_loss(mixed.nats, mixed_vanilla.nats),
        cost=compare_loss(_unmix(mixed.nats, study), one.nats),
        gap=measure_gap(mixed, rungs, mixed_vanilla),
    )


def _unmix(nats: torch.Tensor, study: Study) -> torch.Tensor:
    """Rows of a mixed run in the order of the others."""
    return torch.empty_like(nats).index_copy_(0, torch.tensor(study.sequences.mixing()), nats)


def _cells(mixing: Mixing) -> list[str]:
    losses = map(str, (mixing.loss, mixing.mixed_loss, mixing.cost))
    gap = "" if mixing.gap is None else str(mixing.gap.loss)
    return [f"{mixing.active:.1f}", f"{mixing.mixed_active:.1f}", *losses, gap]


def _judge(mixings: dict[str, Mixing]) -> list[Verdict]:
    by_request = [mixings[policy] for policy in BY_REQUEST]
    gaps = [mixing.gap.loss for mixing in by_request if mixing.gap]
    saved = [1 - mixing.mixed_active / mixings["vanilla"].mixed_active for mixing in by_request]
    return [
        Verdict(
            "budgets a request lose no more quality when the domains of a batch differ",
            "mixed over one domain, mnats: " + ", ".join(str(mixing.cost) for mixing in by_request),
            all(mixing.cost.is_lower is not False for mixing in by_request),
        ),
        Verdict(
            "in mixed batches they lose less than one budget for the batch, at equal experts",
            "mnats over Algorithm 2: " + ", ".join(map(str, gaps)),
            all(gap.is_lower for gap in gaps) if gaps else None,
        ),
        Verdict(
            "and fewer experts are active than under vanilla",
            ", ".join(f"{share:.0%} fewer" for share in saved),
            min(saved) > 0,
        ),
    ]


def _plot(mixings: dict[str, Mixing]) -> Figure:
    title = "From batches of one domain (dots) to mixed ones (squares): more experts, and what that costs"
    figure, ((axis,),) = make_figure(title)
    for number, (policy, mixing) in enumerate(mixings.items()):
        color = f"C{number}"
        sides = [(mixing.active, mixing.loss, "o", policy), (mixing.mixed_active, mixing.mixed_loss, "s", None)]
        for experts, loss, marker, label in sides:
            delta, error = loss.delta * 1000, loss.error * 1000
            axis.errorbar(experts, delta, yerr=error, fmt=marker, capsize=2, color=color, label=label)
        start, end = ((experts, loss.delta * 1000) for experts, loss, *_ in sides)
        axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "alpha": 0.5})
    axis.set(xlabel="active experts a layer and step", ylabel="cross-entropy above vanilla's, millinats")
    return figure
