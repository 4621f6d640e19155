"""Detection of the routers in a transformers model.

Each model family routes in its own way, and its configuration does not describe all details. So each layer routes some
random text. The layer's `Router` is the one with which `select()` returns the same experts and weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sglang_xshare import Router, build_plan, select
from sglang_xshare.types import SCORINGS

PROBES = 4, 32
"""The number of random sequences and the tokens in each. They are enough to detect groups, biases and scores."""
SAME = 0.99
"""The share of rows that must agree. It is below 1, because experts with almost equal scores can change places."""

Choice = tuple[torch.Tensor, torch.Tensor]
"""The expert ids [rows, k] int64 and their weights [rows, k]."""
Choose = Callable[[torch.Tensor, Choice], Choice | None]
"""A function of the router logits [rows, N] and the model's own choice. It returns a new choice, or None for no change.
"""


@dataclass(frozen=True, eq=False)
class Gate:
    """One MoE layer. Its module `gate` computes the router logits.

    In most families, `block.experts` is a module that receives the hidden states, the expert ids and the weights.
    """

    block: nn.Module
    gate: nn.Module

    def count_experts(self) -> int:
        """Return the number of routed experts."""
        return len(self._linear.weight)

    def intercept(self, choose: Choose) -> RemovableHandle:
        """Let `choose` select the experts in every forward until the returned handle is removed."""
        experts = getattr(self.block, "experts", None)
        if experts is None:
            return self.gate.register_forward_hook(partial(self._replace_groups, choose))
        return experts.register_forward_pre_hook(partial(self._replace_choice, choose))

    def find_bias(self) -> torch.Tensor | None:
        """Return the correction bias of the scores [N], or None if the layer has none."""
        tensors = chain(self.block.named_parameters(), self.block.named_buffers())
        found = [tensor for name, tensor in tensors if name.endswith("e_score_correction_bias")]
        return found[0].detach().flatten() if found else None

    @property
    def _linear(self) -> Any:
        return _find_linear(self.gate)

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2).float()
        return nn.functional.linear(rows, self._linear.weight, getattr(self._linear, "bias", None))

    def _replace_choice(self, choose: Choose, experts: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        hidden, ids, weights, *rest = args
        chosen = choose(self._score(hidden), (ids, weights))
        return None if chosen is None else (hidden, chosen[0].to(ids.dtype), chosen[1].to(weights.dtype), *rest)

    def _replace_groups(self, choose: Choose, gate: Any, args: tuple[torch.Tensor, ...], grouped: Any) -> Any:
        """Replace the choice of a Granite gate.

        A Granite block has no module of experts. Its gate returns the slots sorted by expert.
        """
        order, _, sorted_weights, sizes, logits = grouped
        ids, weights = torch.empty_like(order), torch.empty_like(sorted_weights)
        ids[order] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        weights[order] = sorted_weights
        chosen = choose(logits, (ids.view(len(logits), -1), weights.view(len(logits), -1)))
        if chosen is None:
            return None
        flat, order = chosen[0].flatten(), chosen[0].flatten().argsort()
        counts = flat.bincount(minlength=len(sizes)).tolist()
        return order, order // chosen[0].shape[1], chosen[1].flatten()[order].to(weights.dtype), counts, logits


_ROUTERS: WeakKeyDictionary[PreTrainedModel, list[Router]] = WeakKeyDictionary()


def find_gates(model: PreTrainedModel) -> list[Gate]:
    """Return the MoE layers of the model in order."""
    gates = []
    for block in model.modules():
        gate = getattr(block, "gate", getattr(block, "router", None))
        if not isinstance(gate, nn.Module) or not (hasattr(block, "experts") or hasattr(block, "input_linear")):
            continue
        if getattr(getattr(_find_linear(gate), "weight", None), "ndim", 0) == 2:
            gates.append(Gate(block, gate))
    return gates


def _find_linear(gate: nn.Module) -> Any:
    """Return the linear module that computes the router logits: the gate itself or one of its layers."""
    return getattr(gate, "layer", getattr(gate, "wg", gate))


def find_routers(model: PreTrainedModel) -> list[Router]:
    """Return the router of each MoE layer. Raises ValueError if no `Router` can describe a layer."""
    if model not in _ROUTERS:
        gates = find_gates(model)
        seen = _route_random_text(model, gates)
        kinds = list(_list_kinds(model.config))
        _ROUTERS[model] = [_find_router(layer, gate, kinds, *seen[layer]) for layer, gate in enumerate(gates)]
    return _ROUTERS[model]


@torch.inference_mode()
def _route_random_text(model: PreTrainedModel, gates: Sequence[Gate]) -> list[tuple[torch.Tensor, Choice]]:
    """Run the model on random tokens. Return the router logits and the model's own choice for each layer."""
    seen: list[tuple[torch.Tensor, Choice]] = []

    def keep(logits: torch.Tensor, choice: Choice) -> None:
        seen.append((logits, choice))

    tokens = torch.randint(model.config.vocab_size, PROBES, generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        for gate in gates:
            stack.callback(gate.intercept(keep).remove)
        model(tokens, logits_to_keep=1)
    return seen


def _list_kinds(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments of every `Router` that this configuration allows, without the top-k and the bias."""
    groups: list[dict[str, int]] = [{}]
    if (getattr(config, "n_group", None) or 1) > 1:
        groups.append({"num_expert_group": config.n_group, "topk_group": config.topk_group})
    names = ("routed_scaling_factor", "router_scaling_factor")
    scalings = {1.0, *(float(getattr(config, name, None) or 1.0) for name in names)}
    for scoring, renormalize, group, scaling in product(SCORINGS, (True, False), groups, sorted(scalings)):
        yield {"scoring": scoring, "renormalize": renormalize, "scaling": scaling, **group}


def _find_router(
    layer: int, gate: Gate, kinds: Sequence[dict[str, Any]], logits: torch.Tensor, choice: Choice
) -> Router:
    ids, weights = choice
    bias, own = gate.find_bias(), _spread(ids, weights, logits)
    routers = [Router(ids.shape[1], correction_bias=bias, **kind) for kind in kinds]
    for router in routers:
        found = select(logits, build_plan("vanilla"), router)
        ours = _spread(found.topk_ids.clamp(min=0), found.topk_weights, logits)
        if torch.isclose(ours, own, rtol=1e-3, atol=1e-5).all(1).float().mean() >= SAME:
            return router
    raise ValueError(
        f"MoE layer {layer}, {type(gate.block).__name__}: its routing must be {', '.join(SCORINGS)}, with or without a "
        "bias, groups, renormalization and a scaling factor"
    )


def _spread(ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the weights of all experts as [rows, N] float32. Experts that are not chosen have the weight 0."""
    return torch.zeros_like(logits, dtype=torch.float32).scatter_add(1, ids.long(), weights.float())
