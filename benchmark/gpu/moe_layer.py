"""MoE layers as the server runs them: upstream's router, or the stage's, and upstream's fused Triton runner."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmark.gpu import timing
from sglang_xshare import Batch, Router, SelectionPlan, hooks, select
from sglang_xshare.selection.alignment import align_pairs
from sglang_xshare.stage import handover
from sglang_xshare.stage.frame import Assignment, Frame, ModelForward
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.step import Step
from sglang_xshare.types import Alignment

Route = Callable[[int, Tensor], Any]
"""Returns upstream's top-k output for a layer's number and input [rows, hidden]."""
COMMON = 0.47
"""Share of the logits' variance that all rows have in common. At 0.47, 16 rows have 49 of 128 active at top-8, and OEA
with k0 = 3 and 5 leaves 24 and 35, as on Qwen3-30B-A3B (OEA, Table 4: 48.8, 25.1, 35.1). Independent rows: 82.
"""
COMMON_GPT_OSS = 0.02
"""The same share for gpt-oss, whose rows are nearly independent: 16 rows have 50 of 128 active at top-4.

No count of the trained gpt-oss-120b is published. Two results imply 42 to 60 experts; independent rows have 51.
XShare's Table 3, batch 16: a budget of 24 experts without warm-up gains 25 to 36 %, a warm-up without budget 50 %.
vLLM's pull request 35551: a budget of 24 shortens a step from 11.9 to 8.7 ms. At Qwen3-30B-A3B's share 29.8 experts
would be active, of which a budget of 24 leaves nearly all.
"""


def share_of(model: str) -> float:
    """Return the share of the logits' variance that rows of a model have in common, by its name or type."""
    return COMMON_GPT_OSS if model.startswith(("gpt-oss", "gpt_oss")) else COMMON


@dataclass(frozen=True)
class Shape:
    """A model's MoE layer, in `layers` copies timed in turn, so no expert is in the L2 cache.

    `gpt_oss`: with biases, and clamped.
    """

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int
    gpt_oss: bool = False

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert's weights in bf16: gate, up and down projection."""
        return 3 * self.hidden * self.width * 2


ROWS = 16
"""Tokens of a timed layer."""
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8, layers=8),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, layers=3, gpt_oss=True),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4, layers=6, gpt_oss=True),
    )
}


@lru_cache(maxsize=1)
def make_layers(name: str, rows: int = ROWS) -> "MoeLayers":
    """Return the layers of a shape of `SHAPES`: one layer in a process that only compiles."""
    shape = SHAPES[name]
    return MoeLayers(replace(shape, layers=1) if timing.is_dry else shape, rows)


def draw_logits(shape: Shape, rows: int, device: str, seed: int = 0) -> Tensor:
    """Return [layers, rows, experts] bfloat16 router logits whose rows agree as in a real batch; see `share_of`."""
    shared = share_of(shape.name)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.layers, rows, shape.experts)
    own = torch.randn(size, generator=generator, device=device)
    common = torch.randn((shape.layers, 1, shape.experts), generator=generator, device=device)
    return (shared**0.5 * common + (1 - shared) ** 0.5 * own).bfloat16()


def route_to(active: int, shape: Shape, rows: int, device: str, seed: int = 0) -> Tensor:
    """Return [layers, rows, top_k] int32 ids, distinct in a row, that use exactly `active` experts evenly.

    Raises ValueError for a number of experts that the rows cannot use.
    """
    most = min(shape.experts, rows * shape.top_k)
    if not shape.top_k <= active <= most:
        raise ValueError(f"active must be between {shape.top_k} and {most} (got {active})")
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand((shape.layers, shape.experts), generator=generator, device=device).argsort(1)
    slots = torch.arange(rows * shape.top_k, device=device) % active
    return order[:, slots].unflatten(1, (rows, shape.top_k)).int()


class MoeLayers:
    """Random weights for every layer of a shape, on a GPU, and upstream's runner of them on `rows` rows."""

    def __init__(self, shape: Shape, rows: int) -> None:
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

        publish_arguments()
        self.shape = shape
        experts, hidden, width = shape.experts, shape.hidden, shape.width
        self.gate_up = [_random(experts, 2 * width, hidden) for _ in range(shape.layers)]
        self.down = [_random(experts, hidden, width) for _ in range(shape.layers)]
        self.biases: dict[str, Tensor] = {}
        if shape.gpt_oss:
            self.biases = {"b1": _random(experts, 2 * width), "b2": _random(experts, hidden)}
        self.take_rows(rows)
        self.config = MoeRunnerConfig(
            num_experts=experts,
            num_local_experts=experts,
            hidden_size=hidden,
            intermediate_size_per_partition=width,
            top_k=shape.top_k,
            params_dtype=torch.bfloat16,
            inplace=True,
            gemm1_alpha=1.702 if shape.gpt_oss else None,
            gemm1_clamp_limit=7.0 if shape.gpt_oss else None,
        )

    def take_rows(self, rows: int) -> None:
        """Set the number of rows; the weights stay."""
        self.source = _random(len(self.down), rows, self.down[0].shape[1], std=1.0)
        self.hidden = torch.empty_like(self.source)

    def run(self, route: Route) -> Tensor:
        """Run every layer once. Return the outputs [layers, rows, hidden], which the next run overwrites."""
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_experts

        # The runner writes in place, as in the server; one small copy restores the input of all layers.
        self.hidden.copy_(self.source)
        for i, hidden in enumerate(self.hidden):
            fused_experts(hidden, self.gate_up[i], self.down[i], route(i, hidden), self.config, **self.biases)
        return self.hidden


def fixed_router(ids: Tensor) -> Route:
    """Return a router to `ids` [layers, rows, top_k], all weights equal, which launches nothing."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    weights = torch.full(ids.shape, 1 / ids.shape[-1], dtype=torch.float32, device=ids.device)
    return lambda layer, hidden: StandardTopKOutput(weights[layer], ids[layer], None)


def offer_alignment(route: Route, ids: Tensor, shape: Shape) -> Route:
    """Return a router to fixed ids [layers, rows, top_k] that hands the runner the ids' alignment."""
    alignments = [Alignment(*(tensor.to(ids.device) for tensor in align_pairs(one.cpu()))) for one in ids]
    model_forward = ModelForward(None, [])

    def offer_and_route(layer: int, hidden: Tensor) -> Any:
        routed = route(layer, hidden)
        model_forward.offer = handover.Offer(routed.topk_ids, shape.experts, alignments[layer], set())
        _serve(model_forward)
        return routed

    return offer_and_route


def make_router(shape: Shape, plan: SelectionPlan | None, logits: Tensor) -> Route:
    """Return a router by `logits` [layers, rows, experts]: upstream's own, or under a plan as in a decode step."""
    from sglang.srt.layers.moe.topk import TopKConfig, select_experts

    layer, rows = Layer(0, TopKConfig(top_k=shape.top_k, renormalize=True), None), logits.shape[1]
    step = Step("decode", rows, Batch(torch.ones(rows, dtype=torch.bool, device=logits.device)))
    model_forward = ModelForward(step, [Assignment(plan)])
    layer.current_frame.frame = Frame(step.key, "policy", model_forward)

    def route(number: int, hidden: Tensor) -> Any:
        _serve(None if plan is None else model_forward)
        if plan is None:
            return select_experts(hidden, logits[number], layer.plain_config)
        routed = select_experts(hidden, logits[number], layer.selecting_config)
        return routed._replace(topk_ids=layer.finish(routed.topk_ids, routed.topk_weights))

    return route


def _serve(model_forward: ModelForward | None) -> None:
    """Let the runner take the offers of a forward, as in a server; of None, as in a server without a policy."""
    current_frame = SimpleNamespace(model_forward=model_forward)
    hooks._stage = None if model_forward is None else SimpleNamespace(current_frame=current_frame)  # type: ignore[assignment]


def count_active(shape: Shape, logits: Tensor, plan: SelectionPlan) -> float:
    """Return the mean number of experts of a layer that are active under a plan."""
    chosen = [select(one, plan, Router(top_k=shape.top_k), backend="torch").active for one in logits]
    return sum(int(one.sum()) for one in chosen) / len(chosen)


def publish_arguments() -> None:
    """Publish the default arguments of a server, which upstream's runner reads."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def _random(*size: int, std: float = 0.02) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=std)
