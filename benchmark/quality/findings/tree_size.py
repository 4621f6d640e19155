"""MoE-Spec Figures 2 and 4: the larger the draft tree, the more active experts its verification has."""

import torch
from matplotlib.figure import Figure

from benchmark.common.plot import make_figure
from benchmark.quality.findings.finding import Finding, Study, Verdict
from benchmark.quality.model import prefill, router_logits
from sglang_xshare import build_plan, select

BRANCHES = (1, 4, 8)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
TREES = 32
PAPERS_TREE = 64  # tokens, less the root, of the trees whose routing MoE-Spec shows

Curve = dict[int, float]


def find_tree_size(study: Study) -> Finding:
    """Active experts against the tokens of a draft tree, one request at a time.

    A tree is the text, and beside each of its tokens the model's own best other guesses, `branch` tokens a level; a
    branch of 1 is a chain. (EAGLE's trees come from a draft model's guesses, and grow below wrong ones too.)
    """
    tokens = study.sequences.tokens[:: max(1, len(study.sequences) // TREES)]
    if tokens.shape[1] < study.prompt + max(SIZES):
        raise ValueError(
            f"steps = {tokens.shape[1] - study.prompt - 1}: allowed is at least {max(SIZES)}, the largest tree"
        )
    budget = study.num_experts // 2
    active: dict[str, Curve] = {}
    capped: dict[str, Curve] = {}
    share: dict[str, float] = {}
    for branch in BRANCHES:
        name = "chain" if branch == 1 else f"tree, {branch} a level"
        logits = _tree_logits(study, tokens, branch, max(SIZES) // branch)
        sizes = [size for size in SIZES if size % branch == 0]
        active[name] = {size: _union(logits[:, :, :size], study.router.top_k) for size in sizes}
        capped[f"{name}, moe-spec {budget}"] = {size: _budgeted(logits[:, :, :size], study, budget) for size in sizes}
        share[name] = _share_of_best(logits[:, :, :PAPERS_TREE], budget)
    chance = {size: study.num_experts * (1 - (1 - study.router.top_k / study.num_experts) ** size) for size in SIZES}
    curves = {**active, **capped, "independent tokens": chance}
    return Finding(
        name="tree-size",
        title=f"Active experts of {study.num_experts} a layer, when a draft tree of one request is verified",
        source="MoE-Spec, Figures 2 and 4",
        headings=["draft tokens", *map(str, SIZES)],
        rows=[
            [name, *(f"{curve[size]:.1f}" if size in curve else "-" for size in SIZES)]
            for name, curve in curves.items()
        ],
        verdicts=_judge(active, capped, share, study.num_experts),
        figure=_plot(curves),
        numbers={"active": curves, "utility_of_best_half": share},
    )


@torch.inference_mode()
def _tree_logits(study: Study, tokens: torch.Tensor, branch: int, depth: int) -> torch.Tensor:
    """Router logits [layers, sequences, depth * branch, experts] of a tree after every prompt, level by level."""
    text = tokens[:, study.prompt : study.prompt + depth]
    prefilled = prefill(study.model, tokens[:, : study.prompt])
    guesses = study.model(tokens[:, : study.prompt + depth - 1], logits_to_keep=depth).logits
    guesses.scatter_(2, text[:, :, None], -torch.inf)
    others = guesses.topk(branch - 1).indices.transpose(1, 2)
    levels = torch.cat([text[:, None], others], 1).flatten(1)
    # Column (branch, level) of a tree: it sees the prompt, the text above its level, and itself.
    level = torch.arange(depth).repeat(branch)
    is_text = torch.arange(depth * branch) < depth
    sees = (is_text & (level[None, :] < level[:, None])) | torch.eye(depth * branch, dtype=torch.bool)
    sees = torch.cat([torch.ones(depth * branch, study.prompt, dtype=torch.bool), sees], 1)
    mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf).expand(len(tokens), 1, -1, -1)
    positions = (study.prompt + level).expand(len(tokens), -1)
    logits = router_logits(
        study.model, levels, past_key_values=prefilled.cache, attention_mask=mask, position_ids=positions
    )
    return logits.unflatten(2, (branch, depth)).transpose(2, 3).flatten(2, 3)


def _union(logits: torch.Tensor, top_k: int) -> float:
    """Mean number of experts in some row's top-k; logits [layers, trees, rows, experts]."""
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(3, logits.topk(top_k).indices, True)
    return chosen.any(2).sum(2).float().mean().item()


def _budgeted(logits: torch.Tensor, study: Study, budget: int) -> float:
    """The same under MoE-Spec."""
    plan = build_plan("moe-spec", budget=budget)
    counts = [select(tree, plan, study.router).active.sum() for tree in logits.flatten(0, 1)]
    return torch.stack(counts).float().mean().item()


def _share_of_best(logits: torch.Tensor, count: int) -> float:
    """Share of a tree's routing probability on its `count` best experts."""
    return logits.softmax(3).mean(2).topk(count).values.sum(2).mean().item()


def _judge(
    active: dict[str, Curve], capped: dict[str, Curve], share: dict[str, float], num_experts: int
) -> list[Verdict]:
    largest = max(SIZES)
    tree = {name: curve[largest] / num_experts for name, curve in active.items()}
    held = max(curve[largest] for curve in capped.values())
    return [
        Verdict(
            "large trees activate nearly all experts: 54 of 64 (84 %) at 127 tokens",
            f"at {largest} tokens: " + ", ".join(f"{name} {value:.0%}" for name, value in tree.items()),
            min(tree.values()) >= 0.84,
        ),
        Verdict(
            f"routing over a tree of {PAPERS_TREE} is heavy-tailed: half of the experts hold 93 % of the probability",
            ", ".join(f"{name} {value:.0%}" for name, value in share.items()),
            min(share.values()) >= 0.93,
        ),
        Verdict(
            f"a budget of {num_experts // 2} bounds the experts at any size",
            f"{held:.1f} at {largest} tokens",
            held <= num_experts // 2,
        ),
    ]


def _plot(curves: dict[str, Curve]) -> Figure:
    figure, ((axis,),) = make_figure("The larger the draft tree, the more active experts its verification has")
    for name, curve in curves.items():
        style = "k:" if name == "independent tokens" else "o--" if "moe-spec" in name else "o-"
        axis.plot(list(curve), list(curve.values()), style, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.set(xlabel="draft tokens", ylabel="active experts, mean of the layers")
    return figure
