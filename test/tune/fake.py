"""A server that answers as a real one would whose layers each lose what their setting costs there, and no more."""

from __future__ import annotations

from typing import Any

from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.server import Forced

EXPERTS = 64
WEIGHTS = {0: 0.2, 1: 0.2, 2: 1.0, 3: 2.6}
"""What layers lose, in nats over the experts that a setting takes from them."""


class FakeServer:
    """Wakes `add` + 8 of 40 experts in each layer that selects; a sample loses by the layer's weight and its own."""

    def __init__(self, synergy: float = 0.0) -> None:
        self.url = "http://fake"
        self.synergy = synergy
        self.policy: dict[str, Any] = {"policy": "xshare"}
        self.switched: list[dict[str, Any]] = []

    def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        policy = {name: value for name, value in policy.items() if name not in ("limits", "since_switch")}
        self.policy = policy
        self.switched.append(policy)
        return self.get_policy()

    def get_policy(self) -> dict[str, Any]:
        counts = self._count(16)
        mean = sum(counts.values()) / max(len(counts), 1)
        since = {"layer_steps": len(counts), "mean_before": 40.0, "mean_after": mean, "mean_kept_mass": 0.9}
        return self.policy | {"since_switch": since, "limits": {"moe_layers": list(WEIGHTS)}}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def force(self, prompts: list[list[int]], texts: list[list[int]]) -> list[Forced]:
        counts = self._count(len(texts))
        lost = sum(WEIGHTS[layer] * (40 - count) / 400 for layer, count in counts.items())
        lost += self.synergy * max(len(counts) - 1, 0)
        samples = [2 + (prompt[0] % 7) / 50 for prompt in prompts]
        nats = [own + lost * (1 + (prompt[0] % 5 - 2) / 10) for own, prompt in zip(samples, prompts, strict=True)]
        return [Forced([one] * (len(text) - 1), text[1:]) for one, text in zip(nats, texts, strict=True)]

    def _count(self, rows: int) -> dict[int, int]:
        keys = dict(self.policy)
        schedule = build_schedule(keys.pop("policy"), keys, speculative=False)
        plans = {layer: None if schedule is None else schedule.plan(layer, rows) for layer in WEIGHTS}
        return {layer: min(plan.add + 8, 40) for layer, plan in plans.items() if plan is not None}
