"""OEA, sections 4.1 and B: piggybacking against pruning, and what `p`, `kmax` and `max_rank` are good for."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Verdict
from benchmark.quality.findings.ladder import measure_gap
from benchmark.quality.measure import Loss, compare_loss
from benchmark.studies.judging import below_curve, is_better, is_no_better, join, tally
from benchmark.studies.lab import Lab

SHARES = (0.5, 0.7, 0.9)


def study_oea(lab: Lab) -> Finding:
    """Ablations of Algorithm 2, at equal `k0` or, where they have other numbers of active experts, at equal experts."""
    k, experts = lab.router.top_k, lab.num_experts
    ladder = {f"oea:k0={k0}": k0 for k0 in range(1, k)}
    tried = sorted({max(1, 3 * k // 8), max(1, k // 2), max(1, 5 * k // 8)})
    families: dict[str, dict[str, str]] = {
        "pruned": {f"pruned:k0={k0}": policy for policy, k0 in ladder.items()},
        "p": {f"oea:k0={k0},p={p}": f"oea:k0={k0}" for p in SHARES for k0 in tried},
        "kmax": {f"oea:k0={k0},kmax={kmax}": f"oea:k0={k0}" for kmax in (k - 1, k + 1, k + 2, k + 3) for k0 in tried},
        "max_rank": {
            f"oea:k0={k0},max_rank={rank}": f"oea:k0={k0}"
            for rank in (k, 2 * k, 4 * k)
            if rank < experts
            for k0 in tried
        },
    }
    policies = [*ladder, *(policy for family in families.values() for policy in family)]
    losses = {policy: lab.loss(policy) for policy in policies}
    rungs = [lab.decode(policy) for policy in ladder]
    over = {
        policy: compare_loss(lab.decode(policy).nats, lab.decode(base).nats)
        for name, family in families.items()
        if name != "p"
        for policy, base in family.items()
    }
    gaps = {policy: measure_gap(lab.decode(policy), rungs, lab.decode()) for policy in families["p"]}
    curve = [(lab.decode(policy).active, losses[policy]) for policy in ladder]
    at_equal = {
        policy: below
        for policy, gap in gaps.items()
        if gap and (below := below_curve((lab.decode(policy).active, losses[policy]), curve, gap.loss.error))
    }
    return Finding(
        name="oea",
        title=f"OEA: {lab.plain} of mixed domains",
        source="OEA, sections 4.1 and B",
        headings=["policy", "experts", "loss, mnats", "over k0 alone, mnats"],
        rows=[
            [policy, f"{lab.decode(policy).active:.1f}", str(loss), _told((over | at_equal).get(policy))]
            for policy, loss in losses.items()
        ],
        verdicts=_judge(families, over, list(at_equal.values()), k),
        figure=_plot(lab, ladder, families, losses, k),
        numbers={
            policy: {
                "active_experts": lab.decode(policy).active,
                "loss": asdict(loss),
                "over_k0": asdict(over[policy]) if policy in over else None,
                "over_k0_at_equal_experts": asdict(at_equal[policy]) if policy in at_equal else None,
            }
            for policy, loss in losses.items()
        },
    )


def _told(loss: Loss | None) -> str:
    return "" if loss is None else str(loss)


def _judge(
    families: Mapping[str, Mapping[str, str]], over: Mapping[str, Loss], at_equal: Sequence[Loss], k: int
) -> list[Verdict]:
    def of(family: str, key: str = "") -> list[Loss]:
        return [over[policy] for policy in families[family] if policy.endswith(key)]

    pruned, fewer, more = of("pruned"), of("kmax", f"kmax={k - 1}"), of("kmax", f"kmax={k + 1}")
    most, own = of("kmax", f"kmax={k + 3}"), of("max_rank", f"max_rank={k}")
    further = [over[policy] for policy in families["max_rank"] if not policy.endswith(f"max_rank={k}")]
    worse = is_better(pruned)
    return [
        Verdict(
            "Figure 2: piggybacking loses less than pruning with the same experts active",
            f"pruned over OEA: {tally(pruned)}",
            None if worse is None else not worse,
        ),
        Verdict(
            "p < 1 does not help: at equal experts no better than p = 1",
            tally(at_equal),
            is_no_better(at_equal),
        ),
        Verdict(
            "kmax = k works best: fewer lose more",
            f"kmax = k - 1 over k: {join(fewer)}",
            None if is_better(fewer) is None else not is_better(fewer),
        ),
        Verdict(
            "and kmax = k + 1 does not improve on k",
            f"over k: {join(more)}",
            is_no_better(more),
        ),
        Verdict(
            "kmax = k + 3 is worse than k",
            f"over k: {join(most)}",
            None if is_better(most) is None else not is_better(most),
        ),
        Verdict(
            "max_rank = k is strictly worse than none: experts that a token would not choose help it",
            f"over none: {join(own)}",
            None if is_better(own) is None else not is_better(own),
        ),
        Verdict("no max_rank below N helps", f"over none: {join(further)}", is_no_better(further)),
    ]


def _plot(
    lab: Lab,
    ladder: Mapping[str, int],
    families: Mapping[str, Mapping[str, str]],
    losses: Mapping[str, Loss],
    k: int,
) -> Figure:
    figure, (upper, lower) = make_figure("OEA's ablations: loss over active experts", 2, 2)

    def draw(axis: Axes, policies: Sequence[str], label: str, style: str = "o--") -> None:
        points = sorted((lab.decode(policy).active, losses[policy].delta * 1000) for policy in policies)
        axis.plot([x for x, _ in points], [y for _, y in points], style, label=label)

    for axis, (name, family) in zip((*upper, *lower), families.items(), strict=True):
        draw(axis, list(ladder), "OEA, Algorithm 1", "ko-")
        keys = dict.fromkeys(policy.rpartition(",")[2] if "," in policy else "pruned" for policy in family)
        for key in keys:
            members = [policy for policy in family if policy.endswith(key) or key == "pruned"]
            draw(axis, members, key if key == "pruned" else key.replace("kmax", f"(k = {k}) kmax"))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("active experts a layer and step")
        axis.set_ylabel("cross-entropy above vanilla's, mnats")
        axis.set_yscale("symlog", linthresh=1)
    return figure
