"""Decoding in which a row's dropped experts are not replaced by others, but by stand-ins of their own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.quality.model import Layout, Prefilled
from benchmark.quality.routing import Choice, Choose, Gate, find_gates, find_routers
from benchmark.quality.stand_ins.factors import Moments, StandIns, Weights, root_moment
from sglang_xshare import Batch, Router, SelectionPlan, select


@dataclass(frozen=True)
class Loads:
    """What the steps load; every list has a tensor [steps] float32 for each MoE layer: experts that are awake,
    stand-ins that are used, and both in experts' worth of bytes.
    """

    awake: list[torch.Tensor] = field(default_factory=list)
    used: list[torch.Tensor] = field(default_factory=list)
    worth: list[torch.Tensor] = field(default_factory=list)


def read_weights(model: PreTrainedModel) -> list[Weights]:
    """Of each MoE layer. Raises ValueError where experts are kept in another way."""
    return [Weights(experts.gate_up_proj.data, experts.down_proj.data) for experts in _list_experts(model)]


@torch.inference_mode()
def observe(model: PreTrainedModel, tokens: torch.Tensor) -> list[tuple[Moments, Moments]]:
    """Of each MoE layer, the inputs of its experts on `tokens` [sequences, tokens]: (of each expert, of them all)."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with ExitStack() as stack:
        for experts in _list_experts(model):
            hook = experts.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[1])))
            stack.callback(hook.remove)
        model(tokens, logits_to_keep=1)
    found = []
    for experts, (hidden, ids) in zip(_list_experts(model), seen, strict=True):
        inputs = [hidden[(ids == expert).any(1)] for expert in range(experts.num_experts)]
        inner = [_activate(experts, expert, some) for expert, some in enumerate(inputs)]
        each = Moments(*(torch.stack([root_moment(one) for one in some]) for some in (inputs, inner)))
        found.append((each, Moments(root_moment(torch.cat(inputs)), root_moment(torch.cat(inner)))))
    return found


@torch.inference_mode()
def decode(
    prefilled: Prefilled, tokens: torch.Tensor, plan: SelectionPlan, layout: Layout, stand_ins: Sequence[StandIns]
) -> tuple[torch.Tensor, Loads]:
    """Continue with `tokens` [sequences, tokens], each row with its own top-k: full experts where `plan` keeps them,
    else their `stand_ins`, one of each layer. Returns logits [sequences, tokens, vocabulary], and what was loaded.
    """
    model, loads = prefilled.model, Loads()
    with ExitStack() as stack:
        for gate, router, own in zip(find_gates(model), find_routers(model), stand_ins, strict=True):
            stack.enter_context(_extended(gate.block.experts, own.weights))
            stack.callback(gate.intercept(_choose(gate, router, plan, layout, own, tokens.shape[1], loads)).remove)
        logits = model(tokens, past_key_values=prefilled.copy().cache).logits
    return logits.float(), loads


def _choose(
    gate: Gate, router: Router, plan: SelectionPlan, layout: Layout, stand_ins: StandIns, tokens: int, loads: Loads
) -> Choose:
    num_experts, batch = gate.count_experts(), Batch(tokens_per_request=layout.tokens_per_request)

    def choose(logits: torch.Tensor, choice: Choice) -> Choice:
        steps, own = (layout.split(one.unflatten(0, (-1, tokens))) for one in (logits, choice[0]))
        kept = torch.stack([select(step, plan, router, batch).selected for step in steps])
        flat = own.flatten(1)
        wanted = torch.zeros_like(kept).scatter(1, flat, True)
        awake, used = (wanted & kept).sum(1).float(), (wanted & ~kept).sum(1).float()
        loads.awake.append(awake)
        loads.used.append(used)
        loads.worth.append(awake + stand_ins.own * used + stand_ins.common * (used > 0))
        ids = own + num_experts * (~kept).gather(1, flat).view_as(own)
        return layout.join(ids, tokens).flatten(0, 1), choice[1]

    return choose


@contextmanager
def _extended(experts: Any, more: Weights) -> Iterator[None]:
    """Within this context the layer has as many experts again, numbered from N on."""
    before = experts.gate_up_proj, experts.down_proj
    both = [torch.cat(pair) for pair in zip(before, more.pair, strict=True)]
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(one, requires_grad=False) for one in both)
    experts.num_experts *= 2
    try:
        yield
    finally:
        experts.gate_up_proj, experts.down_proj = before
        experts.num_experts //= 2


def _activate(experts: Any, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """What an expert's `down` reads, [rows, I]."""
    gate, up = F.linear(hidden, experts.gate_up_proj[expert]).chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def _list_experts(model: PreTrainedModel) -> list[Any]:
    found = [getattr(gate.block, "experts", None) for gate in find_gates(model)]
    for layer, experts in enumerate(found):
        own = getattr(experts, "gate_up_proj", None)
        if not isinstance(own, torch.Tensor) or own.shape[2] != experts.down_proj.shape[1]:
            kind = type(experts).__name__
            raise ValueError(f"MoE layer {layer}, {kind}: allowed are experts with gate_up_proj [N, 2I, hidden]")
    return found
