"""MoE layers that run as in a server, with SGLang's router or a policy, and with SGLang's fused Triton runner."""

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
"""A function that returns SGLang's top-k output for the index of a layer and its input [rows, hidden]."""
COMMON = 0.47
"""The share of the logits' variance that is common to all rows.

With 0.47, 16 rows activate 49 of 128 experts at top-8. OEA leaves 24 experts with k0=3 and 35 with k0=5. These numbers
match Qwen3-30B-A3B: Table 4 of OEA reports 48.8, 25.1 and 35.1. Independent rows would activate 82 experts.
"""
COMMON_GPT_OSS = 0.02
"""The same share for gpt-oss, whose rows are almost independent: 16 rows activate 50 of 128 experts at top-4.

The number of active experts of the trained gpt-oss-120b is not published. Two results imply 42 to 60 experts:

- Table 3 of XShare, batch size 16: a budget of 24 experts without warm-up gains 25 to 36 %. A warm-up without a budget
  gains 50 %.
- vLLM's pull request 35551: a budget of 24 experts reduces the time of a step from 11.9 to 8.7 ms.

Independent rows would activate 51 experts. With the share of Qwen3-30B-A3B, only 29.8 experts would be active, and a
budget of 24 would keep almost all of them.
"""


def share_of(model: str) -> float:
    """Return the share of the logits' variance that is common to all rows. `model` is the name or type of a model."""
    return COMMON_GPT_OSS if model.startswith(("gpt-oss", "gpt_oss")) else COMMON


@dataclass(frozen=True)
class Shape:
    """The shape of a model's MoE layer.

    `layers` copies of the layer run one after another, so that no expert is in the L2 cache. If `gpt_oss` is true, the
    experts have biases and their activations are clamped.
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
        """Return the number of bytes of one expert's weights in bf16."""
        return 3 * self.hidden * self.width * 2


ROWS = 16
"""The number of tokens in a measured layer."""
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
    """Create the layers of a shape in `SHAPES`. A process that only compiles kernels gets a single layer."""
    shape = SHAPES[name]
    return MoeLayers(replace(shape, layers=1) if timing.is_dry else shape, rows)


def draw_logits(shape: Shape, rows: int, device: str, seed: int = 0) -> Tensor:
    """Draw router logits, [layers, rows, experts] bfloat16. The rows agree as in a real batch, see `share_of`."""
    shared = share_of(shape.name)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.layers, rows, shape.experts)
    own = torch.randn(size, generator=generator, device=device)
    common = torch.randn((shape.layers, 1, shape.experts), generator=generator, device=device)
    return (shared**0.5 * common + (1 - shared) ** 0.5 * own).bfloat16()


def route_to(active: int, shape: Shape, rows: int, device: str, seed: int = 0) -> Tensor:
    """Return expert ids that use exactly `active` experts, [layers, rows, top_k] int32.

    These experts are used as evenly as possible, and the ids of a row are distinct. Raises ValueError if the rows
    cannot use this number of experts.
    """
    most = min(shape.experts, rows * shape.top_k)
    if not shape.top_k <= active <= most:
        raise ValueError(f"active must be between {shape.top_k} and {most} (got {active})")
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand((shape.layers, shape.experts), generator=generator, device=device).argsort(1)
    slots = torch.arange(rows * shape.top_k, device=device) % active
    return order[:, slots].unflatten(1, (rows, shape.top_k)).int()


class MoeLayers:
    """MoE layers with random weights on a GPU. SGLang's Triton runner computes them for `rows` rows."""

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
        """Set the number of rows and draw new inputs. The weights stay unchanged."""
        self.source = _random(len(self.down), rows, self.down[0].shape[1], std=1.0)
        self.hidden = torch.empty_like(self.source)

    def run(self, route: Route) -> Tensor:
        """Run every layer once and return the outputs [layers, rows, hidden]. The next run overwrites them."""
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_experts

        # As in a server, the runner overwrites its input. This small copy restores the inputs of all layers.
        self.hidden.copy_(self.source)
        for i, hidden in enumerate(self.hidden):
            fused_experts(hidden, self.gate_up[i], self.down[i], route(i, hidden), self.config, **self.biases)
        return self.hidden


def fixed_router(ids: Tensor) -> Route:
    """Return a router that always selects `ids` [layers, rows, top_k] with equal weights. It launches no kernel."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    weights = torch.full(ids.shape, 1 / ids.shape[-1], dtype=torch.float32, device=ids.device)
    return lambda layer, hidden: StandardTopKOutput(weights[layer], ids[layer], None)


def offer_alignment(route: Route, ids: Tensor, shape: Shape) -> Route:
    """Return a router that also offers the runner a prebuilt alignment of the fixed ids [layers, rows, top_k]."""
    alignments = [Alignment(*(tensor.to(ids.device) for tensor in align_pairs(one.cpu()))) for one in ids]
    model_forward = ModelForward(None, [])

    def offer_and_route(layer: int, hidden: Tensor) -> Any:
        routed = route(layer, hidden)
        model_forward.offer = handover.Offer(routed.topk_ids, shape.experts, alignments[layer], set())
        _serve(model_forward)
        return routed

    return offer_and_route


def make_router(shape: Shape, plan: SelectionPlan | None, logits: Tensor) -> Route:
    """Return a router for `logits` [layers, rows, experts].

    If `plan` is None, this is SGLang's own router. Otherwise, it selects with the plan, as in a decode step.
    """
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
    """Let the runner take the alignments that a forward offers. None stands for a server without a policy."""
    current_frame = SimpleNamespace(model_forward=model_forward)
    hooks._stage = None if model_forward is None else SimpleNamespace(current_frame=current_frame)  # type: ignore[assignment]


def count_active(shape: Shape, logits: Tensor, plan: SelectionPlan) -> float:
    """Return the mean number of active experts per layer under a plan."""
    chosen = [select(one, plan, Router(top_k=shape.top_k), backend="torch").active for one in logits]
    return sum(int(one.sum()) for one in chosen) / len(chosen)


def publish_arguments() -> None:
    """Set the global server arguments to their defaults, because SGLang's runner reads them."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def _random(*size: int, std: float = 0.02) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=std)
