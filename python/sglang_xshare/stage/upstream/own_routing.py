"""Routing functions that models bring along themselves, where they equal a router that the stage reproduces.

Each is known by the very object that its model's class or module holds, not by its name.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any


def read_own_routing(function: Any, renormalize: bool) -> dict[str, Any] | None:
    """Keyword arguments of the `Router` that a model's own routing function equals; None for one that is not known.

    `renormalize` is what upstream calls it with.
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
