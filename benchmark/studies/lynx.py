"""Lynx, Figures 6 to 9: which choices, tokens, phases and layers suffer where experts are denied."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Verdict
from benchmark.quality.measure import Loss, compare_loss
from benchmark.quality.model import router_logits
from benchmark.studies.lab import Lab
from benchmark.studies.masking import Mask, Masked, blocks, confidence, deny_rank

FEWEST, QUANTILES = 3, (0.25, 0.5, 0.75)
"""How many times the loss of any other choice the first one's is in Figure 6; thresholds of confidence."""

Nats = Mapping[str, torch.Tensor]


def study_lynx(lab: Lab) -> Finding:
    """A row that is denied one of its choices routes to the best of the others, its own number k + 1 among them."""
    masked = Masked(lab.model, lab.sequences, lab.decoding.prompt)
    vanilla = masked.run()
    ranks = {f"choice {rank}": masked.run(_everywhere(partial(deny_rank, rank))) for rank in range(lab.router.top_k)}
    tokens, shares = _by_confidence(lab, masked)
    first = _everywhere(partial(deny_rank, 0))
    phases = {"in prefill": masked.run(prompt=first), "in decode": masked.run(first)}
    windows = _by_window(lab, masked)
    near = min(lab.decoding.prompt, vanilla.shape[1])  # as many tokens after the prompt as there are in it
    soon, soon_vanilla = {name: nats[:, :near] for name, nats in phases.items()}, vanilla[:, :near]
    return Finding(
        name="lynx",
        title="Lynx: experts denied to every row, or to some",
        source="Lynx, Figures 6 - 9",
        headings=["denied", "loss, mnats"],
        rows=[
            *([f"{name}, all layers", str(compare_loss(nats, vanilla))] for name, nats in ranks.items()),
            *(
                [f"choice 0, {name}, a row so treated", str(_each(nats, vanilla, shares[name]))]
                for name, nats in tokens.items()
            ),
            *(
                [f"choice 0, {name}, the next {near} tokens", str(compare_loss(nats, soon_vanilla))]
                for name, nats in soon.items()
            ),
            *([f"choice 0, but not in {name}", str(compare_loss(nats, vanilla))] for name, nats in windows.items()),
        ],
        verdicts=_judge(lab, vanilla, ranks, tokens, soon, windows),
        figure=_plot(vanilla, ranks, tokens, shares, soon, windows),
        numbers={
            "ranks": _losses(ranks, vanilla),
            "confidence": {
                name: {"rows": shares[name], **asdict(_each(nats, vanilla, shares[name]))}
                for name, nats in tokens.items()
            },
            "phases": _losses(soon, soon_vanilla),
            "windows": _losses(windows, vanilla),
        },
    )


def _everywhere(deny: Callable[[torch.Tensor], torch.Tensor]) -> Mask:
    return lambda layer, hidden, logits: deny(logits)


def _by_confidence(lab: Lab, masked: Masked) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Nats where only rows above, or below, a quantile of their layer's confidence lose their first choice; and the
    share of rows that do.
    """
    seen = confidence(router_logits(lab.model, lab.sequences.tokens[:, :-1])[:, :, lab.decoding.prompt :])
    nats, shares = {}, {}
    for quantile in QUANTILES:
        thresholds = seen.flatten(1).quantile(quantile, dim=1)

        def above(
            layer: int, hidden: torch.Tensor, logits: torch.Tensor, cut: torch.Tensor = thresholds
        ) -> torch.Tensor:
            return torch.where((confidence(logits) > cut[layer])[:, None], deny_rank(0, logits), logits)

        def below(
            layer: int, hidden: torch.Tensor, logits: torch.Tensor, cut: torch.Tensor = thresholds
        ) -> torch.Tensor:
            return torch.where((confidence(logits) <= cut[layer])[:, None], deny_rank(0, logits), logits)

        for name, mask, share in (("above", above, 1 - quantile), ("below", below, quantile)):
            nats[f"confidence {name} quantile {quantile}"] = masked.run(mask)
            shares[f"confidence {name} quantile {quantile}"] = share
    return nats, shares


def _by_window(lab: Lab, masked: Masked) -> dict[str, torch.Tensor]:
    """Nats where the first choice is denied in all layers but a window of one or two that slides."""
    layers = len(blocks(lab.model))

    def spare(window: range) -> Mask:
        return lambda layer, hidden, logits: logits if layer in window else deny_rank(0, logits)

    windows = [range(start, start + size) for size in (1, 2) for start in range(layers - size + 1) if size < layers]
    return {_name(window): masked.run(spare(window)) for window in windows}


def _name(window: range) -> str:
    return f"layer {window[0]}" if len(window) == 1 else f"layers {window[0]} - {window[-1]}"


def _losses(runs: Nats, vanilla: torch.Tensor) -> dict[str, dict[str, float]]:
    return {name: asdict(compare_loss(nats, vanilla)) for name, nats in runs.items()}


def _each(nats: torch.Tensor, vanilla: torch.Tensor, share: float) -> Loss:
    """The loss over the share of rows that was treated."""
    loss = compare_loss(nats, vanilla)
    return Loss(loss.cross_entropy, loss.delta / share, loss.error / share)


def _is_higher(nats: torch.Tensor, other: torch.Tensor) -> bool | None:
    lower = compare_loss(nats, other).is_lower
    return None if lower is None else not lower


def _judge(lab: Lab, vanilla: torch.Tensor, ranks: Nats, tokens: Nats, phases: Nats, windows: Nats) -> list[Verdict]:
    by_rank = [compare_loss(nats, vanilla) for nats in ranks.values()]
    ratio = by_rank[0].delta / max(max(loss.delta for loss in by_rank[1:]), 1e-9)
    falling = all(one.delta > other.delta - 2 * other.error for one, other in pairwise(by_rank))
    high, low = tokens["confidence above quantile 0.5"], tokens["confidence below quantile 0.5"]
    prefill, decode = phases["in prefill"], phases["in decode"]
    layers = len(blocks(lab.model))
    single = [windows[_name(range(layer, layer + 1))] for layer in range(layers) if layers > 1]
    told = [compare_loss(nats, vanilla) for nats in single]
    inner = min(range(1, layers - 1), key=lambda layer: told[layer].delta, default=None)
    outer = [] if inner is None else [compare_loss(single[inner], single[layer]) for layer in (0, layers - 1)]
    return [
        Verdict(
            f"Figure 6: the first choice dominates, denying it costs {FEWEST} to 5 times what denying another does",
            f"{ratio:.1f} times the most that another costs; mnats by choice: {', '.join(map(str, by_rank))}",
            ratio >= FEWEST,
        ),
        Verdict("Figure 6: what denying a choice costs falls with its rank", "as above", falling),
        Verdict(
            "Figure 7: confident tokens suffer more from losing their first choice",
            f"the confident half {compare_loss(high, vanilla)}, the other half {compare_loss(low, vanilla)} mnats",
            _is_higher(high, low),
        ),
        Verdict(
            "Figure 8: reassigning in prefill costs much, in decode little",
            f"{compare_loss(prefill, vanilla[:, : prefill.shape[1]])} in prefill, "
            f"{compare_loss(decode, vanilla[:, : decode.shape[1]])} mnats in decode",
            _is_higher(prefill, decode),
        ),
        Verdict(
            "Figure 9: the middle layers matter most",
            f"of {layers} layers, sparing one leaves {', '.join(map(str, told))} mnats",
            None if not outer or None in (votes := [one.is_lower for one in outer]) else all(votes),
        ),
    ]


def _plot(
    vanilla: torch.Tensor,
    ranks: Nats,
    tokens: Nats,
    shares: Mapping[str, float],
    phases: Nats,
    windows: Nats,
) -> Figure:
    figure, (upper, lower) = make_figure("Lynx: what is lost where experts are denied", 2, 2)
    bars = {
        "Figure 6: the choice that every row is denied": {
            name.removeprefix("choice "): compare_loss(nats, vanilla) for name, nats in ranks.items()
        },
        "Figure 8: first choice denied, next tokens": {
            name: compare_loss(nats, vanilla[:, : nats.shape[1]]) for name, nats in phases.items()
        },
        "Figure 9: first choice denied, but not in": {
            name.removeprefix("layer ").removeprefix("layers "): compare_loss(nats, vanilla)
            for name, nats in windows.items()
        },
    }
    for axis, (title, losses) in zip((upper[0], *lower), bars.items(), strict=True):
        deltas, errors = ([getattr(one, key) * 1000 for one in losses.values()] for key in ("delta", "error"))
        axis.bar(list(losses), deltas, yerr=errors, capsize=2)
        axis.set_title(title, fontsize=9)
    for side in ("above", "below"):
        some = {name: nats for name, nats in tokens.items() if side in name}
        losses_ = [_each(nats, vanilla, shares[name]) for name, nats in some.items()]
        deltas, errors = ([getattr(one, key) * 1000 for one in losses_] for key in ("delta", "error"))
        upper[1].errorbar(QUANTILES, deltas, yerr=errors, fmt="o-", capsize=2, label=f"rows {side} it")
    upper[1].set_title("Figure 7: first choice denied to rows by their confidence", fontsize=9)
    upper[1].set_xlabel("quantile of the layer's confidence")
    for axis in (*upper, *lower):
        axis.set_ylabel("cross-entropy above vanilla's, mnats")
    return figure
