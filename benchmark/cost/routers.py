"""The routing of a decode step without the rest of the model. SGLang's own code runs with and without a policy."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopKConfig, select_experts

from benchmark.common.variant import Variant, parse_plan
from benchmark.cost.report import UPSTREAM
from sglang_xshare import Batch, Router, hooks, select
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.acceptance import Acceptance
from sglang_xshare.stage.exact import Exact
from sglang_xshare.stage.forward import wrap_model
from sglang_xshare.stage.frame import CurrentFrame
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.stage import Stage
from sglang_xshare.upstream.batches import Batches

WARM_UPS = 10
OTHER_WORK = 64 << 20
"""The number of bytes that are read between layers. In a server, reading the experts also empties the CPU caches."""


@dataclass(frozen=True)
class DecodeShape:
    """The size of a decode step: rows, layers, experts and top-k."""

    rows: int = 16
    layers: int = 4
    experts: int = 128
    top_k: int = 8


def time_routing(variants: Sequence[Variant], shape: DecodeShape, rounds: int) -> list[list[float]]:
    """Measure the CPU time of a step's routing and of the stage around it in seconds, for each variant and round."""
    models = [Routers(shape, variant) for variant in variants]
    return time_alternating([model.time_step for model in models], rounds, WARM_UPS)


class Routers:
    """A model that consists only of softmax routers. If the variant has a policy, the model also has a stage."""

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
            current_frame = CurrentFrame()
            layers = [
                Layer(n, config, None, current_frame=current_frame, index=n) for n, config in enumerate(self.configs)
            ]
            self.configs = [layer.plain_config for layer in layers]
            self.stage = Stage(
                layers,
                schedule,
                device="cpu",
                exact=Exact("cpu"),
                acceptance=Acceptance(),
                find_batches=lambda rows: Batches(),
                recapture=lambda *args: None,
            )
            wrap_model(self, self.stage)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> None:
        """Run the router of every layer once."""
        self.seconds_elsewhere = 0.0
        for number, config in enumerate(self.configs):
            began = time.process_time()
            self.other.add_(1)
            self.seconds_elsewhere += time.process_time() - began
            select_experts(self.hidden, self.logits, config, layer_id=number)

    def time_step(self) -> float:
        """Run the routing of one decode step. Return its CPU time in seconds, which includes the stage."""
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


TOP_K = 8
TOKENS_PER_REQUEST = 4  # for a policy with a budget per request


def time_selection(rows: int, experts: int, plans: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Measure SGLang's router and every policy on the same random logits [rows, experts].

    Return the CPU time per call in seconds, for each round.
    """
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(0))
    calls = {UPSTREAM: _make_upstream(logits)} | {plan: make_call(logits, plan) for plan in plans}
    times = time_alternating([call_timer(call) for call in calls.values()], rounds)
    return dict(zip(calls, times, strict=True))


def make_call(logits: torch.Tensor, spelling: str) -> Callable[[], object]:
    """Return a function that calls `select()` as the server does. Raises ValueError if the policy is spelt wrong."""
    plan = parse_plan(spelling, len(logits))
    batch = Batch(tokens_per_request=TOKENS_PER_REQUEST if plan.add_per_request or plan.scope == "request" else 1)
    router = Router(TOP_K)
    return lambda: select(logits, plan, router, batch)


def _make_upstream(logits: torch.Tensor) -> Callable[[], object]:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # otherwise the import below looks for a GPU
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    hidden_states = torch.empty(len(logits), 1)
    return lambda: fused_topk_torch_native(hidden_states, logits, TOP_K, True)


SLICE_S = 0.005  # the duration of one timing in seconds; a shorter timing is too noisy


def time_alternating(timers: Sequence[Callable[[], float]], rounds: int, warm_ups: int = 1) -> list[list[float]]:
    """Return the values of each timer for all rounds.

    The timers take turns, so a drift of the machine's speed does not favour a timer.
    """
    times: list[list[float]] = [[] for _ in timers]
    for number in range(-warm_ups, rounds):
        for spent, timer in zip(times, timers, strict=True):
            value = timer()
            if number >= 0:
                spent.append(value)
    return times


def call_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Return a timer that measures the CPU time of a call in seconds. It repeats the call for about SLICE_S."""
    _time(call, 3)  # the first calls are slower, because they import modules and fill caches
    repeat = max(1, round(SLICE_S / max(_time(call, 3), 1e-9)))
    return lambda: _time(call, repeat)


def _time(call: Callable[[], object], repeat: int) -> float:
    began = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - began) / repeat
