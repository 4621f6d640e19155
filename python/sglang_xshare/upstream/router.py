"""The router of a layer, read from SGLang's `TopKConfig`."""

import inspect
import sys
from functools import partial
from typing import Any

from ..types import SCORINGS, Router
from .routing import num_shared_slots, renormalizes_biased_groups, routes_on


def read_router(topk_config: Any) -> Router:
    """Return the `Router` for SGLang's `TopKConfig`. Raises ValueError if `Router` cannot express this router."""
    if topk_config.custom_routing_function is not None:
        own = _read_own_routing(topk_config.custom_routing_function, topk_config.renormalize)
        if own is None:
            raise ValueError("a routing function of the model's own")
        return Router(top_k=topk_config.top_k, **own)
    scoring, bias = topk_config.scoring_func, topk_config.correction_bias
    if scoring not in SCORINGS:
        raise ValueError(f"scoring function {scoring!r}: must be one of {', '.join(SCORINGS)}")
    grouped = topk_config.use_grouped_topk
    if bias is not None and grouped:
        scoring = "sigmoid"  # as in SGLang, although GLM-4-MoE's config has the default, softmax
        if not topk_config.renormalize and renormalizes_biased_groups():
            raise ValueError(
                "a grouped router with a bias must renormalize: this release renormalizes it in FlashInfer's kernel "
                "whatever its config says"
            )
    elif bias is not None and scoring == "softmax":
        # ERNIE 4.5 has a bias [1, N]. On CUDA and ROCm upstream's `fused_topk` ignores the bias.
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
    """Raise ValueError for fused shared experts that `Router` cannot express.

    One fused shared expert is allowed if SGLang appends its column to the columns of the routed experts.
    """
    shared, grouped = num_shared_slots(topk_config), topk_config.use_grouped_topk
    # A softmax router without groups instead chooses one routed expert too many. Every other router without groups does
    # so too, except CUDA's `moe_fused_gate`.
    known = topk_config.renormalize and (grouped or (scoring != "softmax" and routes_on("_is_cuda")))
    if shared > 1 or (shared and not known):
        kind = f"{'' if grouped else 'un'}grouped{'' if topk_config.renormalize else ', not renormalizing'}"
        raise ValueError(
            f"{shared} fused shared experts in a router that is {kind} ({scoring}); must be one shared expert, in a "
            "renormalizing router with groups or, on CUDA, not of softmax; use --disable-shared-experts-fusion"
        )


def _find(module: str, path: str) -> Any:
    """Return the object at `path` in a module of SGLang's models, or None if the module is not loaded."""
    found: Any = sys.modules.get(f"sglang.srt.models.{module}")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _read_own_routing(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Return the arguments of a `Router` for a model's own routing function, or None if the function is unknown.

    A function is known if it is the same object as in the model's class or module, whatever its name. `renormalize` is
    the argument that SGLang passes to the function.
    """
    if function is _find("cohere2_moe", "cohere2_sigmoid_topk"):  # the top-k of the sigmoids
        return {"scoring": "sigmoid", "renormalize": renormalize}
    # The sigmoids of the top-k logits, rounded to the activations' dtype and never renormalized.
    if function is _find("llama4", "Llama4MoE.custom_routing_function"):
        return {"scoring": "sigmoid", "renormalize": False}
    # The top-k of the sigmoids, with a bias that only affects the choice. With softmax, the function adds the bias to
    # the logits, which `Router` cannot express.
    if isinstance(function, partial) and function.func is _find("afmoe", "AfmoeMoE._custom_routing_function"):
        if function.keywords["score_func"] == "sigmoid":
            bias = function.keywords["expert_bias"]
            return {"scoring": "sigmoid", "correction_bias": bias, "renormalize": renormalize}
        return None
    # Softmax, with the same number of experts from each group.
    method = getattr(function, "__func__", None)
    if method and method is _find("interns1pro", "InternS1ProTextDecoderLayer._custom_routing_function"):
        groups = max(function.__self__.router_n_groups, 1)
        return {"scoring": "softmax", "renormalize": renormalize, "quota_groups": groups if groups > 1 else None}
    # The softmax of the top-k logits, times a factor for each expert. The functions of all layers share their code.
    make, code = _find("gemma4_causal", "Gemma4MoE.__init__"), getattr(function, "__code__", None)
    if make and code and any(code is constant for constant in make.__code__.co_consts):
        scale = inspect.getclosurevars(function).nonlocals["per_expert_scale"]
        return {"scoring": "softmax", "renormalize": True, "expert_scale": scale}
    return None
