"""MoE-Spec, Figures 5 to 8: rankings, coverage policies, reconstruction error, and where routing is concentrated."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Verdict
from benchmark.quality.measure import Loss, compare_loss
from benchmark.quality.model import router_logits
from benchmark.studies.judging import are_even, join
from benchmark.studies.lab import Lab
from benchmark.studies.masking import Mask, Masked, blocks
from benchmark.studies.reconstruction import errors_along, gram_of, greedy_order

CODE, PROSE = ("c", "python"), ("english",)
SAVED, CONCENTRATED = 0.2, 10
"""What counts as the paper's quarter of the experts, and as its ratios of 10 to 33."""

COLORS = {"router": "C0", "router, truncate": "C1", "static": "C2", "static, by domain": "C3", "oracle": "C4"}

Errors = Mapping[str, Sequence[float]]


def study_moe_spec(lab: Lab) -> Finding:
    """Verification of one request's chain of drafts; the oracle has seen every expert's output."""
    experts = lab.num_experts
    budgets = [experts * eighths // 8 for eighths in (1, 2, 3, 4, 6)]
    logits, hidden = _observe(lab)
    order = _order(lab, logits)
    own = torch.stack([_order(lab, logits[:, lab.sequences.of_domain(domain)]) for domain in domains_of(lab)], 1)
    errors = _reconstruct(lab, logits, hidden, order)
    vanilla = lab.verify().nats
    masked = Masked(lab.model, lab.sequences, lab.decoding.prompt)
    nats = {
        "router": {budget: lab.verify(f"moe-spec:budget={budget}").nats for budget in budgets},
        "router, truncate": {
            budget: lab.verify(f"moe-spec:budget={budget},coverage=truncate").nats for budget in budgets
        },
        "static": {budget: masked.run(_static_mask(lab, order[:, None], budget)) for budget in budgets},
        "static, by domain": {budget: masked.run(_static_mask(lab, own, budget)) for budget in budgets},
        "oracle": {budget: masked.run(_oracle_mask(lab, budget)) for budget in budgets},
    }
    losses = {name: {budget: compare_loss(run, vanilla) for budget, run in runs.items()} for name, runs in nats.items()}
    over = {
        name: {budget: compare_loss(run, nats["router"][budget]) for budget, run in runs.items()}
        for name, runs in nats.items()
        if name != "router"
    }
    coverage = _coverage(lab, logits)
    concentration = {domain: _concentration(lab, logits, domain) for domain in domains_of(lab)}
    return Finding(
        name="moe-spec",
        title=f"MoE-Spec: {lab.draft}",
        source="MoE-Spec, Figures 5 - 8",
        headings=["budget", *losses, *(f"error, {name}" for name in errors)],
        rows=[
            [
                str(budget),
                *(str(some[budget]) for some in losses.values()),
                *(f"{some[budget]:.3f}" for some in errors.values()),
            ]
            for budget in budgets
        ],
        verdicts=_judge(lab, budgets, losses, over, errors, coverage, concentration),
        figure=_plot(losses, errors, coverage, concentration),
        numbers={
            "loss": {name: {budget: asdict(one) for budget, one in some.items()} for name, some in losses.items()},
            "over_router": {name: {b: asdict(one) for b, one in some.items()} for name, some in over.items()},
            "error": errors,
            "coverage": coverage,
            "concentration": concentration,
        },
    )


def _observe(lab: Lab) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Router logits [layers, sequences, tokens, experts] and each block's inputs [sequences, tokens, hidden], of the
    tokens after the prompt under the model's own routing.
    """
    seen: list[torch.Tensor] = []
    tokens = lab.sequences.tokens[:, :-1]
    hooks = [
        block.gate.register_forward_hook(lambda gate, args, output: seen.append(args[0])) for block in blocks(lab.model)
    ]
    try:
        logits = router_logits(lab.model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    prompt = lab.decoding.prompt
    return logits[:, :, prompt:], [one.view(*tokens.shape, -1)[:, prompt:] for one in seen]


def domains_of(lab: Lab) -> list[str]:
    """The domains by name."""
    return sorted(set(lab.sequences.domains))


def _order(lab: Lab, logits: torch.Tensor) -> torch.Tensor:
    """[layers, experts] int64: a layer's experts by how often each is in a token's top-k (equation 4)."""
    chosen = logits.topk(lab.router.top_k).indices.flatten(1)
    counts = torch.stack([torch.bincount(layer, minlength=lab.num_experts) for layer in chosen])
    return counts.argsort(dim=1, descending=True, stable=True)


def _trees(lab: Lab, rows: torch.Tensor) -> torch.Tensor:
    """[sequences, tokens, x] to [steps, rows of a step, x]."""
    return lab.draft.split(rows)


def _reconstruct(
    lab: Lab, logits: torch.Tensor, hidden: Sequence[torch.Tensor], order: torch.Tensor
) -> dict[str, list[float]]:
    """Ranking -> squared error of a layer's outputs with a budget of 0, 1, .. experts, over that with none, mean of
    the layers.
    """
    errors: dict[str, list[torch.Tensor]] = {"router": [], "static": [], "oracle": []}
    for block, some, layer, fixed in zip(blocks(lab.model), hidden, logits, order, strict=True):
        steps = _trees(lab, layer)
        gram = gram_of(block, _trees(lab, some), steps, lab.router.top_k)
        by_router = steps.softmax(-1).sum(1).argsort(dim=1, descending=True, stable=True)
        errors["router"].append(errors_along(gram, by_router))
        errors["static"].append(errors_along(gram, fixed.expand(len(steps), -1)))
        errors["oracle"].append(errors_along(gram, greedy_order(gram)))
    return {name: torch.stack(some).mean(0).tolist() for name, some in errors.items()}


def _static_mask(lab: Lab, orders: torch.Tensor, budget: int) -> Mask:
    """`orders` [layers, 1 or domains, experts] are of all text, or of each domain's."""
    names = domains_of(lab)
    domain = torch.tensor([names.index(name) for name in lab.sequences.domains])

    def mask(layer: int, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        dropped = orders[layer, :, budget:]
        dropped = dropped.expand(len(names), -1)[domain.repeat_interleave(len(logits) // len(domain))]
        return logits.scatter(1, dropped, -torch.inf)

    return mask


def _oracle_mask(lab: Lab, budget: int) -> Mask:
    """Each step keeps the oracle's best for the hidden states that it really has; rows substitute among them."""

    def mask(layer: int, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = len(logits) // len(lab.sequences)
        steps, inputs = (_trees(lab, rows.unflatten(0, (-1, tokens))) for rows in (logits, hidden))
        dropped = greedy_order(gram_of(blocks(lab.model)[layer], inputs, steps, lab.router.top_k))[:, budget:]
        lost = torch.zeros(steps.shape[0], steps.shape[2], dtype=torch.bool).scatter_(1, dropped, True)
        kept = steps.masked_fill(lost[:, None, :], -torch.inf)
        return lab.draft.join(kept, tokens).flatten(0, 1)

    return mask


def _coverage(lab: Lab, logits: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """Domain -> share of a tree's routing probability on its 1, 2, .. best experts: `mean` of trees and layers, and its
    standard `error`, tree by tree.
    """
    found = {}
    for domain in domains_of(lab):
        rows = lab.sequences.of_domain(domain)
        trees = torch.stack([_trees(lab, layer[rows].softmax(-1)).mean(1) for layer in logits])
        shares = trees.sort(2, descending=True).values.cumsum(2).mean(0)
        error = shares.std(0) / len(shares) ** 0.5
        found[domain] = {"mean": shares.mean(0).tolist(), "error": error.tolist()}
    return found


def _concentration(lab: Lab, logits: torch.Tensor, domain: str) -> list[float]:
    """By layer: tokens that choose the most frequent pair of experts, over those that choose an average pair."""
    k, experts = lab.router.top_k, lab.num_experts
    found = []
    for layer in logits:
        chosen = layer[lab.sequences.of_domain(domain)].flatten(0, 1)
        hits = torch.zeros(chosen.shape).scatter_(1, chosen.topk(k).indices, 1.0)
        pairs = (hits.T @ hits).fill_diagonal_(0)
        expected = len(hits) * k * (k - 1) / (experts * (experts - 1))
        found.append(pairs.max().item() / expected)
    return found


def budget_at(errors: Sequence[float], error: float) -> float:
    """The budget at which a falling curve has this error, on the line between two budgets."""
    for budget, (high, low) in enumerate(pairwise(errors)):
        if low <= error:
            return budget + (high - error) / (high - low) if high > low else float(budget)
    return float(len(errors) - 1)


def _judge(
    lab: Lab,
    budgets: Sequence[int],
    losses: Mapping[str, Mapping[int, Loss]],
    over: Mapping[str, Mapping[int, Loss]],
    errors: Errors,
    coverage: Mapping[str, Mapping[str, Sequence[float]]],
    concentration: Errors,
) -> list[Verdict]:
    low, half = lab.num_experts // 4, lab.num_experts // 2
    static, own = over["static"], over["static, by domain"]
    truncate, oracle = over["router, truncate"], over["oracle"]
    saved = {budget: 1 - budget_at(errors["oracle"], errors["router"][budget]) / budget for budget in (low, half)}
    best = lab.num_experts // 8 - 1
    eighth = {domain: (curve["mean"][best], curve["error"][best]) for domain, curve in coverage.items()}
    code, prose = ([eighth[domain] for domain in some if domain in eighth] for some in (CODE, PROSE))
    ahead = [one - other for one, _ in code for other, _ in prose]
    doubt = 2 * max((error for _, error in eighth.values()), default=0.0) * 2**0.5
    ratios = [ratio for some in concentration.values() for ratio in some]
    return [
        Verdict(
            "Figure 5a: a static order fails at a quarter of the experts, where the router's holds",
            f"at {low}: static {losses['static'][low]}, router {losses['router'][low]} mnats",
            None if static[low].is_lower is None else not static[low].is_lower,
        ),
        Verdict(
            "section 3.2: at half of them it performs comparably",
            f"at {half}: {static[half]} mnats over the router's",
            static[half].is_lower is not False,
        ),
        Verdict(
            "and so does one of each domain's own, which fails at a quarter",
            f"over the router's, mnats, at {', '.join(map(str, own))}: {join(own.values())}",
            own[low].is_lower is False and own[half].is_lower is not False,
        ),
        Verdict(
            "Figure 5a: the oracle is better than the router, most at tight budgets",
            f"over the router's, mnats, at {', '.join(map(str, oracle))}: {join(oracle.values())}",
            oracle[budgets[0]].is_lower,
        ),
        Verdict(
            "Figure 6: the oracle has the router's reconstruction error with 25 % fewer experts",
            ", ".join(f"{share:.0%} fewer than {budget}" for budget, share in saved.items()),
            min(saved.values()) >= SAVED,
        ),
        Verdict(
            "Figure 5b: truncating and substituting perform comparably",
            f"truncate over substitute, mnats, at {', '.join(map(str, truncate))}: {join(truncate.values())}",
            are_even(list(truncate.values())),
        ),
        Verdict(
            "Figure 7: code concentrates its routing on fewer experts than prose",
            "share of the best eighth: "
            + ", ".join(f"{name} {one:.1%} ± {e:.1%}" for name, (one, e) in eighth.items()),
            None if not ahead or abs(min(ahead)) <= doubt else min(ahead) > 0,
        ),
        Verdict(
            "Figure 7: of code the best eighth holds over 90 %",
            ", ".join(f"{share:.0%}" for share, _ in code) or "no code here",
            min(share for share, _ in code) > 0.9 if code else None,
        ),
        Verdict(
            "Figure 8: some pairs of experts are chosen together 10 to 33 times more often than pairs at random",
            f"{min(ratios):.0f} to {max(ratios):.0f} times, mean {sum(ratios) / len(ratios):.0f}",
            sum(ratios) / len(ratios) >= CONCENTRATED,
        ),
    ]


def _plot(
    losses: Mapping[str, Mapping[int, Loss]],
    errors: Errors,
    coverage: Mapping[str, Mapping[str, Sequence[float]]],
    concentration: Errors,
) -> Figure:
    figure, (upper, lower) = make_figure("MoE-Spec: rankings, coverage, and where routing is concentrated", 2, 2)
    for name, some in losses.items():
        deltas, bars = ([getattr(one, key) * 1000 for one in some.values()] for key in ("delta", "error"))
        upper[0].errorbar(list(some), deltas, yerr=bars, fmt="o-", capsize=2, label=name, color=COLORS[name])
    upper[0].set_yscale("symlog", linthresh=1)
    upper[0].set(xlabel="budget", ylabel="cross-entropy above vanilla's, mnats")
    for name, curve in errors.items():
        upper[1].plot(curve, label=name, color=COLORS[name])
    upper[1].set(xlabel="budget", ylabel="squared error of a layer's output, relative")
    for number, (domain, curve) in enumerate(coverage.items()):
        mean = curve["mean"]
        lower[0].plot(range(1, len(mean) + 1), mean, label=domain, color=f"C{number + 5}")
        ratios = concentration[domain]
        lower[1].plot(range(len(ratios)), ratios, "o-", label=domain, color=f"C{number + 5}")
    lower[0].set(xlabel="best experts of a tree", ylabel="share of routing probability")
    lower[1].set(xlabel="layer", ylabel="most frequent pair over an average one")
    lower[1].set_xticks(range(max(map(len, concentration.values()))))
    for axis, number in zip((*upper, *lower), (5, 6, 7, 8), strict=True):
        axis.set_title(f"Figure {number}", fontsize=9)
    return figure
