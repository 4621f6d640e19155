"""XShare Figure 3: tokens of one draft want the same experts, tokens of other requests others."""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Study, Verdict
from benchmark.quality.model import router_logits

PAIRS = 20_000
KINDS = ("next token of a draft", "third next of a draft", "other request, same domain", "other domain", "by chance")


@dataclass(frozen=True)
class Pairs:
    """Pairs of tokens, each of them (sequence, position): two tensors [pairs, 2]."""

    left: torch.Tensor
    right: torch.Tensor


def find_overlap(study: Study) -> Finding:
    """|E_i and E_j| of two tokens' top-k experts, for the model's k and others, over random pairs of each kind."""
    top_k = study.router.top_k
    sizes = [size for size in (top_k // 2, top_k, 2 * top_k, 4 * top_k) if 0 < size < study.num_experts]
    tokens = study.sequences.tokens[:, :-1]
    logits = router_logits(study.model, tokens)
    pairs = dict(zip(KINDS, _draw_pairs(study.sequences.domains, study.prompt, tokens.shape[1]), strict=False))
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for size in sizes:
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(3, logits.topk(size).indices, True)
        for kind, drawn in pairs.items():
            left, right = (chosen[:, ends[:, 0], ends[:, 1]] for ends in (drawn.left, drawn.right))
            shared = (left & right).sum(2).float().mean(0)
            means[kind].append(shared.mean().item())
            errors[kind].append(shared.std().item() / len(shared) ** 0.5)
        means["by chance"].append(size**2 / logits.shape[3])
    rows = [[kind, *(f"{mean:.2f}" for mean in means[kind])] for kind in KINDS]
    return Finding(
        name="overlap",
        title="Experts that two tokens have in common among their top k",
        source="XShare, Figure 3",
        headings=["two tokens", *(f"k = {size}" for size in sizes)],
        rows=rows,
        verdicts=_judge(means, errors, sizes.index(top_k)),
        figure=_plot(means, sizes),
        numbers={"k": sizes, "mean": means, "standard_error": errors},
    )


def _draw_pairs(domains: tuple[str, ...], prompt: int, length: int) -> list[Pairs]:
    """Random pairs for the kinds but the last, all of them after the prompt."""
    draw = torch.Generator().manual_seed(0)
    names = sorted(set(domains))
    domain = torch.tensor([names.index(name) for name in domains])

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (PAIRS,), generator=draw)

    sequence, position = integers(0, len(domains)), integers(prompt, length - 3)
    left = torch.stack([sequence, position], 1)
    drafts = [Pairs(left, torch.stack([sequence, position + distance], 1)) for distance in (1, 3)]
    other, elsewhere = integers(0, len(domains)), integers(prompt, length - 3)
    right = torch.stack([other, elsewhere], 1)
    same = (domain[sequence] == domain[other]) & (sequence != other)
    different = domain[sequence] != domain[other]
    return [*drafts, Pairs(left[same], right[same]), Pairs(left[different], right[different])]


def _judge(means: dict[str, list[float]], errors: dict[str, list[float]], column: int) -> list[Verdict]:
    following, third, domain, other, chance = (means[kind][column] for kind in KINDS)
    doubt = 2 * max(errors[kind][column] for kind in KINDS[:4])
    return [
        Verdict(
            "consecutive draft tokens share 2 - 3 times the experts of two tokens of the dataset",
            f"{following / domain:.2f} times ({following:.2f} against {domain:.2f}), third next {third / domain:.2f}",
            following / domain >= 2,
        ),
        Verdict(
            "tokens of one dataset share more experts than tokens of different ones",
            f"{domain:.2f} against {other:.2f}, and {chance:.2f} by chance",
            domain > other + doubt,
        ),
    ]


def _plot(means: dict[str, list[float]], sizes: list[int]) -> Figure:
    figure, ((axis,),) = make_figure("Experts that two tokens share among their top k")
    width = 0.8 / len(KINDS)
    for index, kind in enumerate(KINDS):
        axis.bar([place + index * width for place in range(len(sizes))], means[kind], width, label=kind)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(sizes))], [f"k = {size}" for size in sizes])
    axis.set_ylabel("experts in common, mean of the layers")
    return figure
