"""A running server as the instrument: its policy is switched, and text forced through its own decode steps."""

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
"""Tokens that are told of each prediction."""
LEAST = 1e-7
"""A probability below it counts as this one: it is what float32 leaves of 1 less the others."""


class Gauge:
    """Measures policies on parts of the samples, against vanilla's predictions there, asked for once. Raises
    `PolicyError` as the server does, and where somebody else switches its policy; ValueError where steps have other
    rows than asked for.
    """

    top = TOP
    tokens_per_request = 1
    """Router rows of a request in a step: more where the server verifies drafts."""

    def __init__(
        self, server: Server, samples: Mapping[str, Sequence[Sample]], guard: SwitchGuard | None = None
    ) -> None:
        self.server = server
        self.guard = guard or SwitchGuard(server)
        self.samples = samples
        self._vanilla: dict[tuple[int, str], list[list[Prediction]]] = {}

    def __call__(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Decode a part under a policy, `batch` samples at a time; what is left over is passed over. Leaves the policy
        in force, but for vanilla's where it is known.
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
        # Of captured graphs also layers that stay vanilla are counted, which save nothing.
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
    """Whether the server whose counts these are pages experts in, which then cost more than active ones do."""
    return since.get("page_ins") is not None


def diverge(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The Kullback-Leibler divergence of a prediction from `reference`, in nats; both are log-probabilities by token.
    Over the tokens that both tell and one bucket for all the rest: a lower bound.
    """
    both = [(math.exp(reference[token]), math.exp(other[token])) for token in reference.keys() & other.keys()]
    rest = (1 - sum(one for one, _ in both), 1 - sum(one for _, one in both))
    pairs = [(max(one, LEAST), max(same, LEAST)) for one, same in [*both, rest]]
    return sum(one * math.log(one / same) for one, same in pairs)
