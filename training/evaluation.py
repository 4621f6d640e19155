"""Measurements on the held-out text of a checkpoint: cross-entropy, arithmetic answers and active experts."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.balance import watch_experts

CONTEXT = 256
STRIDE = 128
PROBLEM = re.compile(r"^(Q: \d+([-+])\d+ A:)( \d+\n)", re.MULTILINE)


def windows(ids: Tensor, context: int = CONTEXT, stride: int = STRIDE) -> Iterator[tuple[Tensor, int]]:
    """Yield overlapping windows of `ids` [tokens], each with the number of its new tokens.

    The new tokens are at the end of a window. Each token is new in exactly one window.
    """
    done = 1
    while done < len(ids):
        last = min(len(ids), context if done == 1 else done + stride)
        yield ids[max(0, last - context) : last], last - done
        done = last


@torch.inference_mode()
def losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the loss, -log P in nats, of all `ids` [tokens] except the first one, as [tokens - 1].

    The context of each token has 128 to 255 tokens, except at the beginning of the text.
    """
    nats = []
    for window, new in windows(ids):
        logits = model(window[None]).logits[0, -new - 1 : -1].float()
        nats.append(F.cross_entropy(logits, window[-new:], reduction="none"))
    return torch.cat(nats)


@torch.inference_mode()
def answer_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> dict[str, float]:
    """Return the share of right answers to the arithmetic problems in `text`, for each operator.

    The answers are greedy, and each problem is a prompt of its own.
    """
    right: dict[str, list[bool]] = {}
    for question, operator, answer in dict.fromkeys(PROBLEM.findall(text)):
        prompt = [tokenizer.eos_token_id, *tokenizer.encode(question, add_special_tokens=False)]
        wanted = tokenizer.encode(answer, add_special_tokens=False)
        logits = model(torch.tensor([prompt + wanted])).logits[0, len(prompt) - 1 : -1]
        right.setdefault(operator, []).append(logits.argmax(-1).tolist() == wanted)
    return {operator: sum(hits) / len(hits) for operator, hits in sorted(right.items())}


@torch.inference_mode()
def routed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the experts of each token as [layers, tokens, top_k]. The model reads CONTEXT tokens at a time."""
    chosen = []
    for window in ids.split(CONTEXT):
        with watch_experts(model) as experts:
            model(window[None])
        chosen.append(torch.stack(experts))
    return torch.cat(chosen, 1)


def experts_active(experts: Tensor, batch: int = 16, batches: int = 200) -> list[float]:
    """Return the mean number of active experts of each layer in random batches of tokens.

    `experts` is [layers, tokens, top_k]. `batch` is the number of tokens in a batch.
    """
    draw = torch.Generator().manual_seed(0)
    layers, tokens, _ = experts.shape
    picks = torch.randint(tokens, (batches, batch), generator=draw)
    hit = torch.zeros(layers, batches, int(experts.max()) + 1, dtype=torch.bool)
    hit.scatter_(2, experts[:, picks].flatten(2), True)
    return hit.sum(2).float().mean(1).tolist()
