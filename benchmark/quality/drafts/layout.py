"""Verify steps in which drafts are right by chance: only emitted tokens count, and the other rows hold other text."""

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
"""A draft's own chance is rounded to a power of this number: 2.5 % off at most, and 255 powers reach 2e-6."""


@dataclass(frozen=True)
class Drafted(Layout):
    """Chains of drafts, each right with `chance` if all before it are.

    A request's step begins at its next token. Its rows up to the first wrong draft are emitted: they are the text. The
    rows after that draft hold a piece of another sequence, because real drafts after a wrong guess continue another
    text. With a `spread` every draft has a chance of its own, evenly distributed, at most `spread` away from `chance`.
    With `told`, selection gets the rows that will be emitted, which no server can predict: a bound of what weights can
    reach. With `own`, selection gets each draft's own chance, as `OWN` to the power of its depth.
    """

    chance: float = 1.0
    spread: float = 0.0
    told: bool = False
    own: bool = False

    def __str__(self) -> str:
        """Return the layout's name with the chance."""
        around = f" ± {self.spread:g}" if self.spread else ""
        return f"{super().__str__()}, right with {self.chance:g}{around}"

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [sequences, tokens, x] as [steps, rows of a step, x], up to the first end. Raises as `check` does."""
        return rows.flatten(0, 1)[_draw(self, *rows.shape[:2]).source]

    def join(self, steps: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the choice for emitted rows, and `own` for tokens after the last step."""
        drawn = _draw(self, *own.shape[:2])
        joined = own.flatten(0, 1).clone()
        joined[drawn.source[drawn.emitted]] = steps[drawn.emitted].to(own.dtype)
        return joined.view(own.shape)

    def describe(self, sequences: int, tokens: int) -> Iterator[Batch]:
        """Yield the `Batch` of each step: with `told`, only emitted rows are live; with `own`, it has chances."""
        drawn = _draw(self, sequences, tokens)
        if self.told:
            return (Batch(emitted, self.tokens_per_request) for emitted in drawn.emitted)
        if self.own:
            return (Batch(None, self.tokens_per_request, depth=depth) for depth in drawn.depth)
        return super().describe(sequences, tokens)

    def check(self, sequences: int, tokens: int) -> None:
        """Raise ValueError for leftover sequences, or for steps that are longer than the text."""
        if sequences % self.batch:
            raise ValueError(f"--batch must divide the {sequences} sequences (got {self.batch})")
        if self.tokens_per_request > tokens:
            raise ValueError(f"--tokens-per-request must be at most --steps {tokens} (got {self.tokens_per_request})")

    def count(self, sequences: int, tokens: int) -> torch.Tensor:
        """Return the tokens that some step has emitted, [sequences, tokens] bool."""
        drawn = _draw(self, sequences, tokens)
        counted = torch.zeros(sequences * tokens, dtype=torch.bool)
        counted[drawn.source[drawn.emitted]] = True
        return counted.view(sequences, tokens)


class _Drawn(NamedTuple):
    """The rows of all steps."""

    source: torch.Tensor
    """[steps, rows] int64: the token of each row, counted over all sequences end to end."""
    emitted: torch.Tensor
    """[steps, rows] bool."""
    depth: torch.Tensor
    """[steps, rows] int32: the power of `OWN` that comes nearest to a row's chance to be emitted."""


@cache
def _draw(layout: Drafted, sequences: int, tokens: int) -> _Drawn:
    """Return the rows; they are equal for layouts that differ only in `told` or `own`, because the seed is fixed."""
    layout.check(sequences, tokens)
    random = torch.Generator().manual_seed(0)
    width = layout.tokens_per_request
    right = torch.rand(sequences, tokens, width - 1, generator=random)
    spread = torch.rand(right.shape, generator=torch.Generator().manual_seed(1))
    chances = layout.chance + layout.spread * (2 * spread - 1)
    depth = pad(chances.log().cumsum(2) / math.log(OWN), (1, 0)).round().to(torch.int32)
    right = right < chances
    lengths = 1 + right.cumprod(2).sum(2)  # of the largest possible number of steps
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
