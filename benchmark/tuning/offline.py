"""A gauge for `tune` that needs no server. It measures policies with a transformers model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmark.quality.measure import Bench, Decoded, diverge
from benchmark.quality.model import Layout, load_model
from benchmark.quality.routing import find_gates
from benchmark.quality.text import Sequences
from sglang_xshare.policies.baselines import VANILLA
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.gauge import TOP
from sglang_xshare.tune.measure import Measurement
from sglang_xshare.tune.texts import Sample


class OfflineGauge:
    """A gauge that measures a policy on samples with the offline model.

    Raises ValueError if the routing of the model cannot be replaced.
    """

    def __init__(self, model: Path, samples: Mapping[str, Sequence[Sample]]) -> None:
        self.model = load_model(model)
        self.layers = range(len(find_gates(self.model)))
        self.samples = samples
        self._benches: dict[tuple[int, str], tuple[Bench, Decoded]] = {}

    def __call__(self, policy: dict[str, Any], batch: int, part: str) -> Measurement:
        """Decode the samples of a part under a policy, `batch` at a time. Leftover samples are skipped."""
        bench, vanilla = self._prepare(batch, part)
        keys = dict(policy)
        schedule = build_schedule(keys.pop("policy"), keys, speculative=False)
        plans = [schedule.plans_for(layer, "decode", batch)[0] if schedule else VANILLA for layer in self.layers]
        live = [layer for layer, plan in zip(self.layers, plans, strict=True) if plan != VANILLA]
        found = bench.run(plans, Layout(batch), TOP) if live else vanilla
        assert found.top is not None
        assert vanilla.top is not None
        nats, greedy = found.nats.mean(1).tolist(), found.greedy.tolist()
        divergences = diverge(vanilla.top, found.top).mean(1).tolist()
        if not live:
            return Measurement(nats, divergences, greedy, None, None, None)
        before, after, kept = (
            fmean(float(of_layers[layer].mean()) for layer in live)
            for of_layers in (found.routing.vanilla_active, found.routing.active, found.routing.kept_mass)
        )
        saved = (before - after) * len(live)
        return Measurement(nats, divergences, greedy, before, saved, kept)

    def _prepare(self, batch: int, part: str) -> tuple[Bench, Decoded]:
        """Return a bench with the prefilled samples, and their results under vanilla."""
        if (batch, part) not in self._benches:
            samples = self.samples[part][: len(self.samples[part]) // batch * batch]
            tokens = torch.tensor([one.prompt + one.text for one in samples])
            bench = Bench(self.model, Sequences(tokens, ("",) * len(tokens)), len(samples[0].prompt))
            self._benches[batch, part] = bench, bench.run(VANILLA, Layout(batch), TOP)
        return self._benches[batch, part]
