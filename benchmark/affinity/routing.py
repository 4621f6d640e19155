"""The experts of every token of real text, packed as bits: a simulated step is a few operations on integers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from benchmark.quality.model import router_logits, router_of
from benchmark.quality.text import Sequences


@dataclass(frozen=True)
class Routing:
    """Sequences that requests draw from: prompts' ids, domains, and the experts of each later token, as bits."""

    prompts: list[list[int]]
    domains: tuple[str, ...]
    experts: list[list[int]]
    layers: int

    def active(self, members: Sequence[tuple[int, int]]) -> float:
        """Return the mean active experts of a layer in a step of these (sequence, step of the sequence)."""
        active = 0
        for sequence, step in members:
            active |= self.experts[sequence][step]
        return active.bit_count() / self.layers


def read_routing(model: PreTrainedModel, sequences: Sequences, prompt: int) -> Routing:
    """Return the model's own routing of sequences [sequences, tokens], by teacher forcing."""
    top_k = router_of(model)[0].top_k
    experts: list[list[int]] = []
    layers = 0
    for tokens in sequences.tokens[:, :-1].split(24):  # sequences of a forward
        logits = router_logits(model, tokens)[:, :, prompt:]
        layers = len(logits)
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(3, logits.topk(top_k).indices, True)
        experts += [[_pack(token) for token in sequence] for sequence in chosen.permute(1, 2, 0, 3).flatten(2)]
    return Routing(sequences.tokens[:, :prompt].tolist(), sequences.domains, experts, layers)


def _pack(bits: torch.Tensor) -> int:
    return int("".join("1" if bit else "0" for bit in bits.tolist()), 2)
