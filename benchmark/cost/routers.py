"""The routing of a decode step as SGLang calls it, without a model around it, with and without the stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopKConfig, select_experts

from benchmark.common.timing import time_alternating
from benchmark.common.variant import Variant
from sglang_xshare import hooks
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.forward import wrap_model
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.stage import Stage

WARM_UPS = 10
OTHER_WORK = 64 << 20
"""Bytes touched between layers, as experts' weights are: in a server, routing finds the caches cold."""


@dataclass(frozen=True)
class DecodeShape:
    """A decode step: its rows, and the model's layers, experts and top-k."""

    rows: int = 16
    layers: int = 4
    experts: int = 128
    top_k: int = 8


def time_routing(variants: Sequence[Variant], shape: DecodeShape, rounds: int) -> list[list[float]]:
    """CPU seconds that a step spends on routing, and on the stage around it, in every round and for each variant."""
    models = [Routers(shape, variant) for variant in variants]
    return time_alternating([model.time_step for model in models], rounds, WARM_UPS)


class Routers:
    """A model of nothing but softmax routers, with the stage around it where the variant has a policy."""

    def __init__(self, shape: DecodeShape, variant: Variant) -> None:
        self.shape = shape
        self.configs = [TopKConfig(top_k=shape.top_k, torch_native=True) for _ in range(shape.layers)]
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(shape.rows, shape.experts, generator=generator).bfloat16()
        self.hidden = torch.zeros(shape.rows, 8)
        self.other = torch.zeros(OTHER_WORK // 4)
        self.seconds_elsewhere = 0.0
        schedule = None if variant.policy is None else build_schedule(variant.policy, variant.keys, speculative=False)
        self.stage: Stage | None = None
        if schedule is not None:
            layers = [Layer(number, config, None) for number, config in enumerate(self.configs)]
            self.stage = Stage(layers, schedule, device="cpu")
            wrap_model(self, self.stage)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> None:
        """Route every layer once."""
        self.seconds_elsewhere = 0.0
        for number, config in enumerate(self.configs):
            began = time.process_time()
            self.other.add_(1)
            self.seconds_elsewhere += time.process_time() - began
            select_experts(self.hidden, self.logits, config, layer_id=number)

    def time_step(self) -> float:
        """CPU seconds that one decode step spends on routing, and on the stage around it."""
        rows = self.shape.rows
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: False, is_decode=lambda: True),
            input_ids=torch.zeros(rows, dtype=torch.int64),
            batch_size=rows,
            global_num_tokens_cpu=None,
        )
        hooks._stage = self.stage
        try:
            began = time.process_time()
            self.forward(None, None, batch)
            return time.process_time() - began - self.seconds_elsewhere
        finally:
            hooks._stage = None
