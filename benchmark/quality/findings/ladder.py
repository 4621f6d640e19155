"""A policy against another one's at as many active experts: who loses less?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmark.quality.measure import Loss, Outcome, agreement, compare_loss


@dataclass(frozen=True)
class Gap:
    """How far a policy lies from a ladder of others, where the line between two rungs wakes as many experts: its loss
    above that line's, and differences that are above 0 where the policy is better.
    """

    loss: Loss
    kept_mass: float
    agreement: float
    accepted: float


def measure_gap(outcome: Outcome, rungs: Sequence[Outcome], vanilla: Outcome) -> Gap | None:
    """The gap between `outcome` and `rungs`; None where it wakes more experts than all of these, or fewer."""
    ladder = sorted(rungs, key=lambda rung: rung.active)
    for low, high in pairwise(ladder):
        if low.active <= outcome.active <= high.active:
            return _gap_between(outcome, low, high, vanilla)
    return None


def _gap_between(outcome: Outcome, low: Outcome, high: Outcome, vanilla: Outcome) -> Gap:
    share = (outcome.active - low.active) / max(high.active - low.active, 1e-9)

    def above(own: float, below: float, over: float) -> float:
        return own - (below + share * (over - below))

    return Gap(
        loss=compare_loss(outcome.nats, torch.lerp(low.nats, high.nats, share)),
        kept_mass=above(outcome.kept_mass, low.kept_mass, high.kept_mass),
        agreement=above(agreement(outcome, vanilla), agreement(low, vanilla), agreement(high, vanilla)),
        accepted=above(outcome.accepted, low.accepted, high.accepted),
    )
