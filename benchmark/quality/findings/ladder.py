"""A policy against another one's at as many active experts: who loses less?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmark.quality.measure import Decoded, Loss, agreement, compare_loss


@dataclass(frozen=True)
class Gap:
    """How far a policy lies from a ladder of others, where the line between two rungs has as many experts: its loss
    above that line's, and differences that are above 0 where the policy is better.
    """

    loss: Loss
    kept_mass: float
    agreement: float
    accepted: float


def measure_gap(decoded: Decoded, rungs: Sequence[Decoded], vanilla: Decoded) -> Gap | None:
    """The gap between `decoded` and `rungs`; None where it has more experts than all of these, or fewer."""
    ladder = sorted(rungs, key=lambda rung: rung.active)
    for low, high in pairwise(ladder):
        if low.active <= decoded.active <= high.active:
            return _gap_between(decoded, low, high, vanilla)
    return None


def _gap_between(decoded: Decoded, low: Decoded, high: Decoded, vanilla: Decoded) -> Gap:
    share = (decoded.active - low.active) / max(high.active - low.active, 1e-9)

    def above(own: float, below: float, over: float) -> float:
        return own - (below + share * (over - below))

    return Gap(
        loss=compare_loss(decoded.nats, torch.lerp(low.nats, high.nats, share)),
        kept_mass=above(decoded.kept_mass, low.kept_mass, high.kept_mass),
        agreement=above(agreement(decoded, vanilla), agreement(low, vanilla), agreement(high, vanilla)),
        accepted=above(decoded.accepted, low.accepted, high.accepted),
    )
