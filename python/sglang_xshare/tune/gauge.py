"""A running server as the instrument: it switches its policy and decodes forced text."""

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
"""Likeliest tokens that a server reports of each prediction."""
LEAST = 1e-7
"""The least probability that counts: in float32, 1 minus the other probabilities is exact to about 1e-7."""


class Gauge:
    """Measurements of policies on parts of the samples, against vanilla's predictions, which are requested once.

    Raises `PolicyError` as the server does, and if somebody else switches its policy; ValueError if steps have another
    number of rows than requested.
    """

    top = TOP
    tokens_per_request = 1
    """Router rows of a request in a step: more than one if the server verifies drafts."""

    def __init__(
        self, server: Server, samples: Mapping[str, Sequence[Sample]], guard: SwitchGuard | None = None
    ) -> None:
        self.server = server
        self.guard = guard or SwitchGuard(server)
        self.samples = samples
        self._vanilla: dict[tuple[int, str], list[list[Prediction]]] = {}

    def __call__(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Decode a part under a policy, `batch` samples at a time, without samples that do not fill a batch.

        The policy stays active; vanilla, once its predictions are known, is neither decoded nor activated again.
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
        if forced is vanilla or not since["layer_steps"]:
            return Measurement(nats, divergences, greedy, None, None, None)
        check_rows(since, batch * self.tokens_per_request)
        counted = ("page_ins_before", "page_ins") if pages(since) else ("experts_before", "experts_after")
        before, after = (since[name] for name in counted)
        # Divided by steps with the policy: captured graphs also count layers that stay vanilla, which save nothing.
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
    """Return whether the server of these counts pages experts; page-ins, which cost most, are then compared."""
    return since.get("page_ins") is not None


def diverge(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the Kullback-Leibler divergence of a prediction from `reference`, in nats; a lower bound.

    Both are log-probabilities by token. The sum has a term for each token in both, and one term for all other tokens.
    """
    both = [(math.exp(reference[token]), math.exp(other[token])) for token in reference.keys() & other.keys()]
    rest = (1 - sum(one for one, _ in both), 1 - sum(one for _, one in both))
    pairs = [(max(one, LEAST), max(same, LEAST)) for one, same in [*both, rest]]
    return sum(one * math.log(one / same) for one, same in pairs)
