"""A layer's router, read from its `TopKConfig`."""

from __future__ import annotations

from typing import Any

from ...types import SCORINGS, Router
from .own_routing import read_own_routing
from .routing import adds_softmax_bias, num_shared_slots, renormalizes_biased_groups, writes_shared_without_groups


def read_router(topk_config: Any) -> Router:
    """The `Router` of an upstream `TopKConfig`. Raises ValueError where the stage cannot reproduce it."""
    if topk_config.custom_routing_function is not None:
        own = read_own_routing(topk_config.custom_routing_function, topk_config.renormalize)
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
