"""Tallies of selections, made up."""

from collections.abc import Sequence

import torch

from sglang_xshare.types import Tally

EXPERTS = 16
Layer = tuple[int, int] | None
"""Active experts under vanilla routing, and active experts; None where the layer stayed vanilla."""


def make_tally(
    layers: Sequence[Layer], kept: Sequence[Sequence[float]] = ((0.0,),), rescued: Sequence[int] | None = None
) -> Tally:
    """Make the tally of a step.

    `kept` has the kept mass of each row, by layer; one entry stands for all layers.
    """
    experts = torch.arange(EXPERTS)
    before, after = (torch.tensor([layer[part] if layer else 0 for layer in layers]) for part in (0, 1))
    return Tally(
        active=experts < after[:, None],
        vanilla_active=experts < before[:, None],
        kept_mass=torch.tensor(kept).expand(len(layers), -1),
        rescued=torch.tensor(rescued or [0] * len(layers)),
    )
