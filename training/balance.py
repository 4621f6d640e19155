"""Losses that keep the experts' load even in training: by a penalty, or by moving the biases of their selection."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

PENALTY = 0.02
BIAS_RATE = 0.005
"""Change of a bias in a step. Wang et al. use 0.001 over tens of thousands of steps; a run here has a thousand."""


def loss_with_penalty(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of `ids` [rows, tokens] in nats plus PENALTY times the load-balancing loss."""
    output = model(ids, output_router_logits=True)
    nats = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return nats + PENALTY * balance_loss(output.router_logits, model.config.num_experts_per_tok)


def loss_with_moved_biases(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of `ids` [rows, tokens] in nats, and move the correction biases.

    The bias of an expert with less than the mean load rises by BIAS_RATE; with more than the mean load it falls by
    BIAS_RATE (Wang et al., 2024, arXiv 2408.15664).
    """
    with watch_experts(model) as chosen:
        logits = model(ids).logits
    for bias, experts in zip(correction_biases(model), chosen, strict=True):
        move_bias(bias, experts)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Return Switch Transformer's load-balancing loss (Fedus et al., 2021), 1 at uniform load, averaged over layers.

    `router_logits` are [tokens, experts] each. transformers' own function pools the layers first, which lets a dozen
    experts of each layer die.
    """
    losses = []
    for logits in router_logits:
        shares = logits.softmax(-1)
        chosen = torch.zeros_like(shares).scatter(1, logits.topk(top_k).indices, 1.0 / top_k)
        losses.append(shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def move_bias(bias: Tensor, experts: Tensor) -> None:
    """Move `bias` [N] by BIAS_RATE against the load of `experts` [tokens, top_k]."""
    load = experts.flatten().bincount(minlength=len(bias)).float()
    bias += BIAS_RATE * (load.mean() - load).sign()


def correction_biases(model: PreTrainedModel) -> list[Tensor]:
    """Return the correction biases of each MoE layer, [N]."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


@contextmanager
def watch_experts(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the experts of every token [tokens, top_k], for each forward within the context and each MoE layer."""
    chosen: list[Tensor] = []

    def keep(experts: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen.append(args[1])

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".mlp.experts"):
                stack.callback(module.register_forward_pre_hook(keep).remove)
        yield chosen
