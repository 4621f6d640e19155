"""The experts of every token in real text. They are stored as bits, so a simulated step is a few integer operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from benchmark.quality.model import router_logits, router_of
from benchmark.quality.text import Sequences


@dataclass(frozen=True)
class Routing:
    """The prompts, their domains, and the experts of every token after each prompt.

    `experts` contains one integer for each token. Each bit of the integer stands for one expert of one layer.
    """

    prompts: list[list[int]]
    domains: tuple[str, ...]
    experts: list[list[int]]
    layers: int

    def active(self, members: Sequence[tuple[int, int]]) -> float:
        """Return the mean number of active experts per layer in one step of a batch.

        `members` contains the sequence of each request, and the number of the sequence's step.
        """
        active = 0
        for sequence, step in members:
            active |= self.experts[sequence][step]
        return active.bit_count() / self.layers


def read_routing(model: PreTrainedModel, sequences: Sequences, prompt: int) -> Routing:
    """Compute the model's own routing for all sequences with teacher forcing."""
    top_k = router_of(model)[0].top_k
    experts: list[list[int]] = []
    layers = 0
    for tokens in sequences.tokens[:, :-1].split(24):  # 24 sequences per forward
        logits = router_logits(model, tokens)[:, :, prompt:]
        layers = len(logits)
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(3, logits.topk(top_k).indices, True)
        experts += [[_pack(token) for token in sequence] for sequence in chosen.permute(1, 2, 0, 3).flatten(2)]
    return Routing(sequences.tokens[:, :prompt].tolist(), sequences.domains, experts, layers)


def _pack(bits: torch.Tensor) -> int:
    return int("".join("1" if bit else "0" for bit in bits.tolist()), 2)
