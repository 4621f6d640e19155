"""Measurements on a running server, which switches its policy and decodes forced text."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .forcing import Prediction
from .guard import SwitchGuard
from .measure import Measurement, check_rows
from .plans import VANILLA_SETTING
from .server import Server
from .texts import Sample

TOP = 32
"""The number of most likely tokens that a server reports for each prediction."""
LEAST = 1e-7
"""The smallest probability that counts. In float32, 1 minus the other probabilities is exact to about 1e-7."""


class Gauge:
    """Measurements of policies on parts of the samples, relative to vanilla.

    Vanilla's predictions are requested only once. Raises `PolicyError` if the server refuses a request, or if somebody
    else switches its policy. Raises ValueError if the steps do not have the requested number of rows.
    """

    top = TOP
    tokens_per_request = 1
    """The router rows of a request in a step. There are several if the server verifies draft tokens."""

    def __init__(
        self, server: Server, samples: Mapping[str, Sequence[Sample]], guard: SwitchGuard | None = None
    ) -> None:
        self.server = server
        self.guard = guard or SwitchGuard(server)
        self.samples = samples
        self._vanilla: dict[tuple[int, str], list[list[Prediction]]] = {}

    def __call__(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Decode a part of the samples under a policy. Return the figures of the policy.

        `batch` samples are decoded at a time. Samples that do not fill a batch are left out. The policy stays active.
        After vanilla's predictions are known, vanilla is neither decoded nor activated again.
        """
        if (batch, part) not in self._vanilla:
            self._vanilla[batch, part] = self._force({"policy": VANILLA_SETTING}, batch, part)
        vanilla = self._vanilla[batch, part]
        forced = vanilla if policy == {"policy": VANILLA_SETTING} else self._force(policy, batch, part)
        nats = [fmean(step.nats for step in one) for one in forced]
        greedy = [[step.greedy for step in one] for one in forced]
        pairs = [zip(own, one, strict=True) for own, one in zip(vanilla, forced, strict=True)]
        divergences = [fmean(diverge(own.likeliest, step.likeliest) for own, step in pair) for pair in pairs]
        since = self.guard.get_policy()["since_switch"]
        if forced is vanilla or not since["outcomes"]["policy"]:
            return Measurement(nats, divergences, greedy, None, None, None)
        check_rows(since, batch * self.tokens_per_request)
        counted = ("page_ins_before", "page_ins") if pages(since) else ("experts_before", "experts_after")
        before, after = (since[name] for name in counted)
        # Divide by the steps with the policy. Captured graphs also count vanilla layers, which save nothing.
        saved = (before - after) / since["outcomes"]["policy"]
        mean = before / since["layer_steps"]
        return Measurement(nats, divergences, greedy, mean, saved, since["mean_kept_mass"])

    def _force(self, policy: dict[str, Any], batch: int, part: str) -> list[list[Prediction]]:
        self.guard.set_policy(policy)
        samples = self.samples[part]
        forced: list[list[Prediction]] = []
        for start in range(0, len(samples) - batch + 1, batch):
            some = samples[start : start + batch]
            forced += self.server.force([one.prompt for one in some], [one.text for one in some], self.top)
        return forced


def pages(since: Mapping[str, Any]) -> bool:
    """Return whether a server pages experts, from its counts.

    If it does, page-ins are compared instead of active experts, because page-ins cost the most.
    """
    return since.get("page_ins") is not None


def diverge(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return a lower bound of the Kullback-Leibler divergence of `other` from `reference`, in nats.

    Both contain log-probabilities by token. The sum has a term for each token in both, and one term for all other
    tokens.
    """
    both = [(math.exp(reference[token]), math.exp(other[token])) for token in reference.keys() & other.keys()]
    rest = (1 - sum(one for one, _ in both), 1 - sum(one for _, one in both))
    pairs = [(max(one, LEAST), max(same, LEAST)) for one, same in [*both, rest]]
    return sum(one * math.log(one / same) for one, same in pairs)
