"""A layer's router, read from its `TopKConfig`."""

import inspect
import sys
from functools import partial
from typing import Any

from ..types import SCORINGS, Router
from .routing import num_shared_slots, renormalizes_biased_groups, routes_on


def read_router(topk_config: Any) -> Router:
    """The `Router` of an upstream `TopKConfig`. Raises ValueError where the stage cannot reproduce it."""
    if topk_config.custom_routing_function is not None:
        own = _read_own_routing(topk_config.custom_routing_function, topk_config.renormalize)
        if own is None:
            raise ValueError("a routing function of the model's own")
        return Router(top_k=topk_config.top_k, **own)
    scoring, bias = topk_config.scoring_func, topk_config.correction_bias
    if scoring not in SCORINGS:
        raise ValueError(f"scoring function {scoring!r}, allowed is {', '.join(SCORINGS)}")
    grouped = topk_config.use_grouped_topk
    if bias is not None and grouped:
        scoring = "sigmoid"  # upstream computes it here whatever the config says: GLM-4-MoE leaves the default
        if not topk_config.renormalize and renormalizes_biased_groups():
            raise ValueError(
                "a grouped router with a bias that does not renormalize, which this release renormalizes all the same "
                "where FlashInfer's kernel takes it; allowed is one that renormalizes"
            )
    elif bias is not None and scoring == "softmax":
        # ERNIE 4.5's, [1, N]. On CUDA and ROCm upstream's `fused_topk` computes without it.
        bias = bias.flatten() if routes_on("_is_cpu") else None
    _check_shared(topk_config, scoring)
    return Router(
        top_k=topk_config.top_k - num_shared_slots(topk_config),
        scoring=scoring,
        correction_bias=bias,
        renormalize=topk_config.renormalize,
        num_expert_group=topk_config.num_expert_group if grouped else None,
        topk_group=topk_config.topk_group if grouped else None,
    )


def _check_shared(topk_config: Any, scoring: str) -> None:
    """Raise ValueError for fused shared experts whose column upstream's router writes in a way of its own."""
    shared, grouped = num_shared_slots(topk_config), topk_config.use_grouped_topk
    # Without groups a softmax router chooses one expert more in its place, and so does every router but CUDA's
    # `moe_fused_gate`.
    known = topk_config.renormalize and (grouped or (scoring != "softmax" and routes_on("_is_cuda")))
    if shared > 1 or (shared and not known):
        kind = f"{'' if grouped else 'un'}grouped{'' if topk_config.renormalize else ', not renormalizing'}"
        raise ValueError(
            f"{shared} fused shared experts in a router that is {kind} ({scoring}), allowed is one in a renormalizing "
            "router, grouped or on CUDA not of softmax; others are served with --disable-shared-experts-fusion"
        )


def _find(module: str, path: str) -> Any:
    """What a model's module of upstream's holds; None where no model has loaded it."""
    found: Any = sys.modules.get(f"sglang.srt.models.{module}")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _read_own_routing(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Keyword arguments of the `Router` that a model's own routing function equals; None for one that is not known.

    Each is known by the very object that its model's class or module holds, not by its name. `renormalize` is what
    upstream calls it with.
    """
    if function is _find("cohere2_moe", "cohere2_sigmoid_topk"):  # top-k of the sigmoids
        return {"scoring": "sigmoid", "renormalize": renormalize}
    # The sigmoids of the top-k logits, which it rounds to the activations' dtype and never renormalizes.
    if function is _find("llama4", "Llama4MoE.custom_routing_function"):
        return {"scoring": "sigmoid", "renormalize": False}
    # Top-k of the sigmoids with a bias, which weighs nothing. Its softmax adds the bias to the logits: not known.
    if isinstance(function, partial) and function.func is _find("afmoe", "AfmoeMoE._custom_routing_function"):
        if function.keywords["score_func"] == "sigmoid":
            bias = function.keywords["expert_bias"]
            return {"scoring": "sigmoid", "correction_bias": bias, "renormalize": renormalize}
        return None
    # As many experts of each group, by softmax.
    method = getattr(function, "__func__", None)
    if method and method is _find("interns1pro", "InternS1ProTextDecoderLayer._custom_routing_function"):
        groups = max(function.__self__.router_n_groups, 1)
        return {"scoring": "softmax", "renormalize": renormalize, "quota_groups": groups if groups > 1 else None}
    # The softmax of the top-k logits, times a factor of each expert. Defined anew in every layer, from one code.
    make, code = _find("gemma4_causal", "Gemma4MoE.__init__"), getattr(function, "__code__", None)
    if make and code and any(code is constant for constant in make.__code__.co_consts):
        scale = inspect.getclosurevars(function).nonlocals["per_expert_scale"]
        return {"scoring": "softmax", "renormalize": True, "expert_scale": scale}
    return None
