"""Static orders of experts, best first, one a MoE layer: read as `moe-spec` takes them, or counted on texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ..policies.schedule import build_schedule
from ..types import Router
from .source import Source

if TYPE_CHECKING:
    import torch

Orders = Mapping[int, Sequence[int]]
"""Expert ids, best first, by layer."""


def read_orders(file: Path, source: Source, keep: int) -> Orders:
    """The orders in a JSON file: a list of expert ids for all layers, or what --expert-policy-config takes for
    `moe-spec`, `order` and overrides by layer; its budget does not count. Raises ValueError for another.
    """
    try:
        given = orjson.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"--order {file}: {error.strerror or error}; allowed is a JSON file") from None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--order {file}: malformed JSON ({error}); allowed is a list, or keys of moe-spec") from None
    keys = {"order": given} if isinstance(given, list) else given
    if not isinstance(keys, dict):
        raise ValueError(f"--order {file}: a JSON {type(keys).__name__}; allowed is a list, or keys of moe-spec")
    try:
        return _read_keys(keys, source, keep)
    except ValueError as error:
        raise ValueError(f"--order {file}: {error}") from None


def _read_keys(keys: dict[str, Any], source: Source, keep: int) -> Orders:
    config = {name: value for name, value in keys.items() if name != "policy"} | {"budget": keep, "ranking": "static"}
    schedule = build_schedule(str(keys.get("policy", "moe-spec")), config, speculative=True)
    assert schedule is not None
    orders = {}
    for layer in source.blocks:
        plan = schedule.plan(layer, schedule.min_tokens)
        if plan is None or plan.order is None or plan.coverage != "substitute" or plan.own_share:
            raise ValueError(f"layer {layer}: allowed is an order, with coverage substitute and own_share 0")
        plan.check(Router(source.model.top_k, renormalize=source.model.renormalize), source.model.num_experts)
        orders[layer] = plan.order
    return orders


def count_orders(
    source: Source, pieces: torch.Tensor, device: str, progress: Callable[[Any], Iterator[torch.Tensor]] = iter
) -> Orders:
    """MoE-Spec's equation 4: experts by how often the model's own top-k has them while it reads `pieces` [pieces,
    length] of token ids; of equals the lower id first. Raises ValueError where other layers are seen than the files
    hold.
    """
    import torch

    from ..affinity.calibration import load_model, watch_experts

    counts = torch.zeros(len(source.blocks), source.model.num_experts, dtype=torch.int64)
    model = load_model(source.folder, device)
    with torch.inference_mode(), watch_experts(model) as seen:
        for tokens in progress(pieces.split(8)):
            seen.clear()
            model(tokens.to(model.device), use_cache=False, logits_to_keep=1)
            if len(seen) != len(counts):
                reason = f"{len(seen)} MoE layers seen and {len(counts)} in its files; allowed is --order"
                raise ValueError(f"--model {source.folder}: {reason}")
            counts += torch.stack([ids.flatten().bincount(minlength=experts) for ids, experts in seen])
    order = counts.argsort(dim=1, descending=True, stable=True)
    return dict(zip(source.blocks, order.tolist(), strict=True))


def format_orders(orders: Orders, keep: int) -> dict[str, Any]:
    """What --expert-policy-config takes for `moe-spec` to keep the same experts of the whole model, in every decode and
    verify step.
    """
    first, *others = orders.items()
    return {
        "budget": keep,
        "ranking": "static",
        "order": list(first[1]),
        "layers": {str(layer): {"order": list(order)} for layer, order in others},
        "phases": ["decode", "verify"],
        "min_tokens": 1,
    }
