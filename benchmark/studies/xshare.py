"""XShare, Figure 1 and sections 3.4 and 6.1: active experts against the formula, fixed budgets against mass."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Verdict
from benchmark.quality.findings.ladder import Gap, measure_gap
from benchmark.quality.measure import Decoded, compare_loss
from benchmark.quality.model import router_logits
from benchmark.studies.judging import is_better, losses_of, tally
from benchmark.studies.lab import Lab

MASSES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CLOSE = 0.1
"""Of the formula's experts: what counts as a match."""


def study_xshare(lab: Lab) -> Finding:
    """Budgets are of the batch, in plain decoding."""
    counts = count_active(lab)
    step = max(1, lab.num_experts // 32)
    fixed = {add: f"xshare:k0=1,add={add}" for add in range(0, 3 * lab.num_experts // 8 + 1, step)}
    by_mass = {
        "mass, with warm-up": [f"xshare:k0=1,mass={mass}" for mass in MASSES],
        "mass, without (Algorithm 1)": [f"xshare:k0=0,mass={mass}" for mass in MASSES],
    }
    rungs = [lab.decode(policy) for policy in fixed.values()]
    families = {"fixed budget, with warm-up": list(fixed.values()), **by_mass}
    gaps = {
        policy: measure_gap(lab.decode(policy), rungs, lab.decode()) for some in by_mass.values() for policy in some
    }
    return Finding(
        name="xshare",
        title=f"XShare: {lab.plain} of mixed domains",
        source="XShare, Figure 1, sections 3.4 and 6.1",
        headings=["policy", "experts", "loss, mnats", "over a fixed budget at equal experts, mnats"],
        rows=[
            [
                policy,
                f"{lab.decode(policy).active:.1f}",
                str(lab.loss(policy)),
                str(gap.loss) if (gap := gaps.get(policy)) else "",
            ]
            for some in families.values()
            for policy in some
        ],
        verdicts=_judge(lab, counts, by_mass, gaps, fixed),
        figure=_plot(lab, counts, families),
        numbers={
            "active": counts,
            "policies": {
                policy: {
                    "active_experts": lab.decode(policy).active,
                    "loss": asdict(lab.loss(policy)),
                    "over_fixed": asdict(gap.loss) if (gap := gaps.get(policy)) else None,
                }
                for some in families.values()
                for policy in some
            },
        },
    )


def count_active(lab: Lab) -> dict[str, dict[int, float]]:
    """Mean active experts of a layer under vanilla, by batch size: of mixed domains, of one, and by the formula."""
    k, experts = lab.router.top_k, lab.num_experts
    sizes = [1]
    while 2 * sizes[-1] <= len(lab.sequences):
        sizes.append(2 * sizes[-1])
    mixed, apart = (_count(lab, some.tokens, sizes) for some in (lab.mixed, lab.sequences))
    per_domain = len(lab.sequences) // len(set(lab.sequences.domains))
    return {
        "mixed domains": mixed,
        "one domain": {size: count for size, count in apart.items() if per_domain % size == 0},
        "the formula": {size: experts * (1 - (1 - k / experts) ** size) for size in sizes},
    }


def _count(lab: Lab, tokens: torch.Tensor, sizes: list[int]) -> dict[int, float]:
    logits = router_logits(lab.model, tokens[:, :-1])[:, :, lab.decoding.prompt :]
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(3, logits.topk(lab.router.top_k).indices, True)
    usable = {size: chosen[:, : len(tokens) // size * size].unflatten(1, (-1, size)) for size in sizes}
    return {size: rows.any(2).sum(3).float().mean().item() for size, rows in usable.items()}


def _judge(
    lab: Lab,
    counts: Mapping[str, Mapping[int, float]],
    by_mass: Mapping[str, Sequence[str]],
    gaps: Mapping[str, Gap | None],
    fixed: dict[int, str],
) -> list[Verdict]:
    formula = counts["the formula"]
    off = {
        name: max((abs(count / formula[size] - 1), size) for size, count in counts[name].items() if size > 1)
        for name in ("mixed domains", "one domain")
    }
    with_warm_up, without = (losses_of(gaps[policy] for policy in some) for some in by_mass.values())
    better = [is_better(some) for some in (with_warm_up, without)]
    bare, some = lab.loss(fixed[0]), [add for add in fixed if add >= lab.num_experts * 3 // 16]
    filled = lab.loss(fixed[some[0]])
    return [
        Verdict(
            "Figure 1: N (1 - (1 - k/N)^B) predicts the active experts closely",
            "off by at most " + ", ".join(f"{share:.0%} at {size} ({name})" for name, (share, size) in off.items()),
            max(share for share, _ in off.values()) <= CLOSE,
        ),
        Verdict(
            "section 3.4: a fixed budget with warm-up does better than a share of the mass without (Algorithm 1)",
            f"mass over fixed at equal experts: {tally(without)}",
            None if better[1] is None else not better[1],
        ),
        Verdict(
            "and than a share of the mass with warm-up",
            f"mass over fixed at equal experts: {tally(with_warm_up)}",
            None if better[0] is None else not better[0],
        ),
        Verdict(
            f"section 6.1: warm-up alone loses drastically, {some[0]} more experts recover much of it",
            f"{bare} alone, {filled} with {some[0]} more: {1 - filled.delta / bare.delta:.0%} recovered",
            filled.delta < bare.delta / 2 if compare_loss(*_pair(lab, fixed, some[0])).is_lower else None,
        ),
    ]


def _pair(lab: Lab, fixed: dict[int, str], add: int) -> tuple[torch.Tensor, torch.Tensor]:
    return lab.decode(fixed[add]).nats, lab.decode(fixed[0]).nats


def _plot(lab: Lab, counts: dict[str, dict[int, float]], families: dict[str, list[str]]) -> Figure:
    figure, ((left, right),) = make_figure("XShare: vanilla's active experts, and two ways to a budget", 1, 2)
    for name, curve in counts.items():
        left.plot(list(curve), list(curve.values()), "k:" if name == "the formula" else "o-", label=name)
    left.set_xscale("log", base=2)
    left.set(xlabel="rows a step", ylabel="active experts, mean of the layers")
    for number, (name, policies) in enumerate(families.items()):
        runs: list[tuple[Decoded, str]] = sorted(
            ((lab.decode(one), one) for one in policies), key=lambda r: r[0].active
        )
        losses = [lab.loss(policy) for _, policy in runs]
        deltas, errors = ([getattr(one, key) * 1000 for one in losses] for key in ("delta", "error"))
        experts = [run.active for run, _ in runs]
        right.errorbar(experts, deltas, yerr=errors, fmt="o-", capsize=2, color=f"C{number + 2}", label=name)
    right.set_yscale("symlog", linthresh=1)
    right.set(xlabel="active experts a layer and step", ylabel="cross-entropy above vanilla's, millinats")
    return figure
