"""Simulated verify steps in which each draft token is right by chance.

Only the loss of accepted tokens counts. The rows after a wrong draft token contain other text.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from benchmark.quality.model import Layout
from sglang_xshare import Batch

OWN = 0.95
"""The base to whose powers the chance of each draft token is rounded.

The rounding error is at most 2.5 %, and the 255th power is 2e-6.
"""


@dataclass(frozen=True)
class Drafted(Layout):
    """Verify steps with a chain of draft tokens per request.

    A draft token is right with the probability `chance` if all previous draft tokens are right. A request's step begins
    at its next token. The rows before the first wrong draft token contain the text itself. The other rows contain a
    piece of another sequence, because real draft tokens after a wrong guess also continue another text.

    - `spread`: each draft token has its own probability, uniformly distributed in `chance` ± `spread`.
    - `told`: selection receives the rows that will be accepted. No server can predict them, so this is an upper bound
      for weighting by acceptance.
    - `own`: selection receives each draft token's own probability, as a power of `OWN`.
    """

    chance: float = 1.0
    spread: float = 0.0
    told: bool = False
    own: bool = False

    def __str__(self) -> str:
        """Return the description of the layout and the chance."""
        around = f" ± {self.spread:g}" if self.spread else ""
        return f"{super().__str__()}, right with {self.chance:g}{around}"

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """Rearrange [sequences, tokens, x] into [steps, rows of a step, x].

        The steps of a batch end when one of its sequences has no more tokens. Raises ValueError as `check` does.
        """
        return rows.flatten(0, 1)[_draw(self, *rows.shape[:2]).source]

    def join(self, steps: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the policy's choice for accepted rows, and the model's `own` choice for all other tokens."""
        drawn = _draw(self, *own.shape[:2])
        joined = own.flatten(0, 1).clone()
        joined[drawn.source[drawn.emitted]] = steps[drawn.emitted].to(own.dtype)
        return joined.view(own.shape)

    def describe(self, sequences: int, tokens: int) -> Iterator[Batch]:
        """Yield a `Batch` for each step.

        If `told` is true, only the accepted rows are live. If `own` is true, the batch contains the probabilities.
        """
        drawn = _draw(self, sequences, tokens)
        if self.told:
            return (Batch(emitted, self.tokens_per_request) for emitted in drawn.emitted)
        if self.own:
            return (Batch(None, self.tokens_per_request, depth=depth) for depth in drawn.depth)
        return super().describe(sequences, tokens)

    def check(self, sequences: int, tokens: int) -> None:
        """Raise ValueError if the batch size does not divide the sequences, or if a step is longer than the text."""
        if sequences % self.batch:
            raise ValueError(f"--batch must divide the {sequences} sequences (got {self.batch})")
        if self.tokens_per_request > tokens:
            raise ValueError(f"--tokens-per-request must be at most --steps {tokens} (got {self.tokens_per_request})")

    def count(self, sequences: int, tokens: int) -> torch.Tensor:
        """Return a bool tensor [sequences, tokens] that marks the tokens that a step has accepted."""
        drawn = _draw(self, sequences, tokens)
        counted = torch.zeros(sequences * tokens, dtype=torch.bool)
        counted[drawn.source[drawn.emitted]] = True
        return counted.view(sequences, tokens)


class _Drawn(NamedTuple):
    """The rows of all steps."""

    source: torch.Tensor
    """The position of each row's token in all sequences, concatenated: [steps, rows] int64."""
    emitted: torch.Tensor
    """True for each row that is accepted: [steps, rows] bool."""
    depth: torch.Tensor
    """The exponent of `OWN` that gives each row's probability of acceptance: [steps, rows] int32."""


@cache
def _draw(layout: Drafted, sequences: int, tokens: int) -> _Drawn:
    """Draw the rows of all steps. The seed is fixed, so `told` and `own` do not change the rows."""
    layout.check(sequences, tokens)
    random = torch.Generator().manual_seed(0)
    width = layout.tokens_per_request
    right = torch.rand(sequences, tokens, width - 1, generator=random)
    spread = torch.rand(right.shape, generator=torch.Generator().manual_seed(1))
    chances = layout.chance + layout.spread * (2 * spread - 1)
    depth = pad(chances.log().cumsum(2) / math.log(OWN), (1, 0)).round().to(torch.int32)
    right = right < chances
    lengths = 1 + right.cumprod(2).sum(2)  # for as many steps as tokens, which is the maximum
    ends = lengths.cumsum(1)
    places = torch.arange(width)
    own = torch.arange(sequences)[:, None, None] * tokens + (ends - lengths)[..., None] + places
    others = (torch.arange(sequences)[:, None] + torch.randint(1, sequences, ends.shape, generator=random)) % sequences
    starts = torch.randint(0, tokens - width + 1, ends.shape, generator=random)
    emitted = places < lengths[..., None]
    source = torch.where(emitted, own, (others * tokens + starts)[..., None] + places)
    parts = []
    for first in range(0, sequences, layout.batch):
        members = slice(first, first + layout.batch)
        steps = int((ends[members] <= tokens).sum(1).min())
        parts.append([one[members, :steps].transpose(0, 1).flatten(1) for one in (source, emitted, depth)])
    return _Drawn(*(torch.cat(column) for column in zip(*parts, strict=True)))
