"""A layer's router, read from its `TopKConfig`."""

import inspect
import sys
from functools import partial
from typing import Any

from ..types import SCORINGS, Router
from .routing import adds_softmax_bias, num_shared_slots, renormalizes_biased_groups, writes_shared_without_groups


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
        bias = bias.flatten() if adds_softmax_bias() else None  # ERNIE 4.5's is [1, N]
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
    # Without groups a softmax router chooses one expert more in its place, and so does every router in plain torch.
    known = topk_config.renormalize and (grouped or (scoring != "softmax" and writes_shared_without_groups()))
    if shared > 1 or (shared and not known):
        kind = f"{'' if grouped else 'un'}grouped{'' if topk_config.renormalize else ', not renormalizing'}"
        raise ValueError(
            f"{shared} fused shared experts in a router that is {kind} ({scoring}), allowed is one in a renormalizing "
            "router, grouped or on CUDA not of softmax; others are served with --disable-shared-experts-fusion"
        )


def _read_own_routing(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Keyword arguments of the `Router` that a model's own routing function equals; None for one that is not known.

    Each is known by the very object that its model's class or module holds, not by its name. `renormalize` is what
    upstream calls it with.
    """
    found = (read(function, renormalize) for read in (_read_sigmoid, _read_afmoe, _read_gemma4, _read_interns1_pro))
    return next((router for router in found if router is not None), None)


def _find(module: str, path: str) -> Any:
    """What a model's module of upstream's holds; None where no model has loaded it."""
    found: Any = sys.modules.get(f"sglang.srt.models.{module}")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _read_sigmoid(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Cohere 2: top-k of the sigmoids. Llama 4: the sigmoids of the top-k logits, which it rounds to the activations'
    dtype and never renormalizes.
    """
    if function is _find("cohere2_moe", "cohere2_sigmoid_topk"):
        return {"scoring": "sigmoid", "renormalize": renormalize}
    if function is _find("llama4", "Llama4MoE.custom_routing_function"):
        return {"scoring": "sigmoid", "renormalize": False}
    return None


def _read_afmoe(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Top-k of the sigmoids with a bias, which weighs nothing. Its softmax adds the bias to the logits: not known."""
    if not isinstance(function, partial) or function.func is not _find("afmoe", "AfmoeMoE._custom_routing_function"):
        return None
    if function.keywords["score_func"] != "sigmoid":
        return None
    bias = function.keywords["expert_bias"]
    return {"scoring": "sigmoid", "correction_bias": bias, "renormalize": renormalize}


def _read_gemma4(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """The softmax of the top-k logits, times a factor of each expert. Defined anew in every layer, from one code."""
    make = _find("gemma4_causal", "Gemma4MoE.__init__")
    code = getattr(function, "__code__", None)
    if code is None or make is None or not any(code is constant for constant in make.__code__.co_consts):
        return None
    scale = inspect.getclosurevars(function).nonlocals["per_expert_scale"]
    return {"scoring": "softmax", "renormalize": True, "expert_scale": scale}


def _read_interns1_pro(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """As many experts of each group, by softmax."""
    method = getattr(function, "__func__", None)
    if method is None or method is not _find("interns1pro", "InternS1ProTextDecoderLayer._custom_routing_function"):
        return None
    groups = max(function.__self__.router_n_groups, 1)
    return {"scoring": "softmax", "renormalize": renormalize, "quota_groups": groups if groups > 1 else None}
