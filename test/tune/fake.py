"""A server that answers as a real one would whose layers each lose what their setting costs there, and no more."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from sglang_xshare.cli import main
from sglang_xshare.live import ADDED
from sglang_xshare.live.client import PolicyError
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.forcing import Prediction

WEIGHTS = {0: 0.2, 1: 0.2, 2: 1.0, 3: 2.6}
"""What layers lose, in nats over the experts that a setting takes from them."""


class FakeServer:
    """`add` + 8 of 40 experts active in layers that select; samples lose, and diverge, by their and its weight."""

    def __init__(
        self, synergy: float = 0.0, captured: bool = False, rows: float = 1.0, harder: Sequence[list[int]] = ()
    ) -> None:
        self.url = "http://fake"
        self.synergy = synergy
        self.captured = captured  # of captured graphs every layer is counted
        self.harder = harder  # prompts: what follows them loses twice as much
        self.share = rows  # of a batch that a step has
        self.paged = False
        self.asked = 16
        self.policy: dict[str, Any] = {"policy": "xshare"}
        self.exact_rule: dict[str, Any] = {}
        self.trial = False
        self.switched: list[dict[str, Any]] = []
        self.intrude: Callable[[FakeServer], None] = lambda server: None  # before each batch that it decodes

    def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        if policy.get("after", len(self.switched)) != len(self.switched):
            raise PolicyError("after", 400)
        self.trial = policy.get("trial", False)
        policy = {name: value for name, value in policy.items() if name not in (*ADDED, "after")}
        self.asked = 16
        self.policy = policy
        self.switched.append(policy)
        return self.get_policy()

    def get_policy(self) -> dict[str, Any]:
        selecting = self._count(self.asked)
        counts = (dict.fromkeys(WEIGHTS, 40) if self.captured else {}) | selecting
        since: dict[str, Any] = {
            "layer_steps": 7 * len(counts),
            "rows": 7 * len(counts) * self.asked * self.share,
            "experts_before": 7 * 40 * len(counts),
            "experts_after": 7 * sum(counts.values()),
            "outcomes": {"policy": 7 if selecting else 0},
            "mean_before": 40.0,
            "mean_kept_mass": 0.9,
        }
        if self.paged:  # a tenth of what is active
            since |= {"page_ins_before": since["experts_before"] / 10, "page_ins": since["experts_after"] / 10}
        limits: dict[str, Any] = {"moe_layers": list(WEIGHTS), "captured_rows": [4, 16] if self.captured else []}
        limits |= {"most_rows": 40, "router": {"top_k": 8, "renormalize": True}}
        counted = {"since_switch": since, "switches": len(self.switched), "trial": self.trial}
        return self.policy | counted | {"limits": limits, "exact_rule": self.exact_rule}

    def ask(self, path: str) -> dict[str, Any]:
        return {"chunked_prefill_size": 100_000, "page_size": 1}

    def get_model(self) -> str:
        return "fake"

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def force(self, prompts: list[list[int]], texts: list[list[int]], top: int = 2) -> list[list[Prediction]]:
        self.intrude(self)
        self.asked = len(texts)
        counts = self._count(len(texts))
        lost = sum(WEIGHTS[layer] * (40 - count) / 400 for layer, count in counts.items())
        lost += self.synergy * max(len(counts) - 1, 0)
        samples = [2 + (prompt[0] % 7) / 50 for prompt in prompts]
        losses = [lost * (1 + (prompt[0] % 5 - 2) / 10) * (1 + (prompt in self.harder)) for prompt in prompts]
        return [
            [Prediction(own + loss, token, {token: -loss}) for token in text[1:]]
            for own, loss, text in zip(samples, losses, texts, strict=True)
        ]

    def _count(self, rows: int) -> dict[int, int]:
        """Active experts of each layer that selects; a plan that would leave all of them active is not run."""
        keys = dict(self.policy)
        schedule = build_schedule(keys.pop("policy"), keys, speculative=False)
        plans = {layer: None if schedule is None else schedule.plan(layer, rows) for layer in WEIGHTS}
        return {layer: plan.add + 8 for layer, plan in plans.items() if plan is not None and plan.add + 8 < 40}


SETTINGS = tuple(f"xshare:k0=1,add={add}" for add in (0, 2, 4, 8, 16, 24))
SMALL = ("--prompt", "8", "--tokens", "8", "--samples", "12")


def tune(texts, out, *more, settings=SETTINGS):
    """Run the command on the texts; returns its exit code."""
    flags = ["--texts", str(texts), "--out", str(out), *SMALL]
    return main(["tune", "http://fake", *settings, *flags, *(more or ("--tolerance", "5%"))])


def read_found(out):
    """(plan, report) of a run."""
    return [json.loads((out / f"{name}.json").read_text()) for name in ("plan", "report")]
