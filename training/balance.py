"""Two methods that balance the load of the experts in training: a penalty, and an update of the correction biases."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

PENALTY = 0.02
BIAS_RATE = 0.005
"""The change of a bias in one step. Wang et al. use 0.001 in tens of thousands of steps; a run here has hundreds."""


def loss_with_penalty(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of `ids` [rows, tokens] in nats, plus PENALTY times the load-balancing loss."""
    output = model(ids, output_router_logits=True)
    nats = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return nats + PENALTY * balance_loss(output.router_logits, model.config.num_experts_per_tok)


def loss_with_moved_biases(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of `ids` [rows, tokens] in nats, and update the correction biases.

    If the load of an expert is below the mean, its bias increases by BIAS_RATE. If the load is above the mean, its bias
    decreases by BIAS_RATE (Wang et al., 2024, arXiv 2408.15664).
    """
    with watch_experts(model) as chosen:
        logits = model(ids).logits
    for bias, experts in zip(correction_biases(model), chosen, strict=True):
        move_bias(bias, experts)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Return the load-balancing loss of Switch Transformer (Fedus et al., 2021). It is 1 if the load is uniform.

    `router_logits` contains one tensor [tokens, experts] for each layer. The loss is computed for each layer and then
    averaged. The function in transformers combines the layers first, and then a dozen experts of each layer are never
    used.
    """
    losses = []
    for logits in router_logits:
        shares = logits.softmax(-1)
        chosen = torch.zeros_like(shares).scatter(1, logits.topk(top_k).indices, 1.0 / top_k)
        losses.append(shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def move_bias(bias: Tensor, experts: Tensor) -> None:
    """Change each bias [N] by BIAS_RATE, so that the load becomes more even. `experts` is [tokens, top_k]."""
    load = experts.flatten().bincount(minlength=len(bias)).float()
    bias += BIAS_RATE * (load.mean() - load).sign()


def correction_biases(model: PreTrainedModel) -> list[Tensor]:
    """Return the correction biases [N] of all MoE layers."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


@contextmanager
def watch_experts(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the experts [tokens, top_k] that each MoE layer uses in the forwards within this context."""
    chosen: list[Tensor] = []

    def keep(experts: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen.append(args[1])

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".mlp.experts"):
                stack.callback(module.register_forward_pre_hook(keep).remove)
        yield chosen
