"""Run in a process of its own, on one patched release: upstream's `select_experts` with and without the stage's layer
at full budget. Prints one JSON line a router: the differences found, or what upstream itself raised.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopKConfig, select_experts

from sglang_xshare import Batch, build_plan
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.step import Step
from sglang_xshare.upstream.router import read_router
from stage.fake import put_in_step

ROWS, EXPERTS, TOP_K = 7, 32, 4
PLANS = ({"policy": "vanilla"}, {"policy": "xshare", "k0": 1, "add": EXPERTS}, {"policy": "oea", "k0": TOP_K})


def list_routers() -> Iterator[dict[str, Any]]:
    """Keyword arguments of a `TopKConfig`, for every kind of router, scaling and sharing."""
    groups = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
    bias = {"correction_bias": torch.linspace(-0.3, 0.3, EXPERTS)}
    kinds: list[dict[str, Any]] = [
        {"scoring_func": "softmax"},
        {"scoring_func": "sigmoid"},
        {"scoring_func": "sigmoid", **bias},
        {"scoring_func": "softmax", **bias},  # ERNIE 4.5's
        {"scoring_func": "sqrtsoftplus"},
        {"scoring_func": "sqrtsoftplus", **bias},  # DeepSeek-V4's
        {"scoring_func": "softmax", **groups},
        {"scoring_func": "sigmoid", **groups},
        {"scoring_func": "sigmoid", **groups, **bias},
        {"scoring_func": "softmax", **groups, **bias},  # GLM-4-MoE's: upstream takes it for a sigmoid one
    ]
    for kind, renormalize, factor, on_output, shared in itertools.product(
        kinds, (True, False), (None, 2.5), (False, True), (0, 1)
    ):
        # Without a factor there is nothing to apply, and a shared expert's weight is left to chance upstream.
        if factor is not None or not (on_output or shared):
            scaling = {"routed_scaling_factor": factor, "apply_routed_scaling_factor_on_output": on_output}
            yield {**kind, **scaling, "renormalize": renormalize, "shared": shared}


def list_own() -> Iterator[tuple[str, dict[str, Any]]]:
    """(a name, keyword arguments of a `TopKConfig`) for every routing function of a model's own that is reproduced."""
    from sglang.srt.models.afmoe import AfmoeMoE
    from sglang.srt.models.cohere2_moe import cohere2_sigmoid_topk
    from sglang.srt.models.gemma4_causal import Gemma4MoE
    from sglang.srt.models.interns1pro import InternS1ProTextDecoderLayer
    from sglang.srt.models.llama4 import Llama4MoE

    bias, scale = torch.linspace(-0.3, 0.3, EXPERTS), torch.nn.Parameter(torch.linspace(0.5, 2, EXPERTS))
    afmoe = partial(AfmoeMoE._custom_routing_function, score_func="sigmoid", expert_bias=bias)
    code = next(
        one for one in Gemma4MoE.__init__.__code__.co_consts if getattr(one, "co_name", "") == "routing_function"
    )
    gemma4 = FunctionType(code, Gemma4MoE.__init__.__globals__, closure=(CellType(scale),))
    layer = object.__new__(InternS1ProTextDecoderLayer)
    torch.nn.Module.__init__(layer)
    layer.router_n_groups = 2
    for renormalize in (True, False):
        kind = " renormalizing" * renormalize
        yield f"AFMoE{kind}", {"custom_routing_function": afmoe, "renormalize": renormalize}
        yield f"Cohere 2{kind}", {"custom_routing_function": cohere2_sigmoid_topk, "renormalize": renormalize}
        interns1 = {"custom_routing_function": layer._custom_routing_function, "renormalize": renormalize}
        yield f"InternS1-Pro{kind}", interns1
    yield "Gemma 4", {"custom_routing_function": gemma4}
    yield "Llama 4", {"custom_routing_function": Llama4MoE.custom_routing_function, "renormalize": False}


def make_config(shared: int, **router: Any) -> TopKConfig:
    """The config of a layer whose router's output holds `shared` columns of fused shared experts."""
    names = {field.name for field in dataclasses.fields(TopKConfig)}
    if "num_fused_shared_experts" in names:
        router["num_fused_shared_experts"] = shared
    elif shared:
        from sglang.srt.layers.moe.topk import SharedExpertsConfig

        router["shared_experts"] = SharedExpertsConfig(num_fused_shared_experts=shared)
    return TopKConfig(top_k=TOP_K + shared, torch_native=True, **router)


def route(config: TopKConfig, logits: torch.Tensor) -> list[dict[int, float]]:
    """{expert: weight} of every row."""
    out = select_experts(torch.zeros(len(logits), 8), logits, config, layer_id=0)
    rows = zip(out.topk_ids.tolist(), out.topk_weights.tolist(), strict=True)
    return [dict(zip(ids, weights, strict=True)) for ids, weights in rows]


def compare(config: TopKConfig, logits: torch.Tensor) -> dict[str, Any]:
    """The largest differences over all plans that leave a row its own top-k."""
    wanted = route(config, logits)
    layer = Layer(0, config, None)
    step = Step("decode", ROWS, Batch())
    rows_apart, error = 0, 0.0
    for keys in PLANS:
        put_in_step(layer, build_plan(keys), step)
        for mine, upstream in zip(route(layer.selecting_config, logits), wanted, strict=True):
            rows_apart += mine.keys() != upstream.keys()
            error = max([error, *(abs(mine[i] - upstream[i]) for i in mine.keys() & upstream.keys())])
    return {"rows_apart": rows_apart, "error": error, "wider": compare_wider(config, layer, logits)}


def compare_wider(config: TopKConfig, layer: Layer, logits: torch.Tensor) -> float:
    """How far the weights are from upstream's for more experts a row: the model's own top-k, and a plan's kmax."""
    if layer.router.quota_groups is not None:
        return 0.0  # top-k are all there are
    shared = config.top_k - layer.router.top_k
    wanted = route(dataclasses.replace(config, top_k=TOP_K + 2 + shared), logits)
    plan = build_plan("custom", add=EXPERTS, utility="full", kmax=TOP_K + 2)
    put_in_step(layer, plan, layer.step)
    rows = zip(route(layer.selecting_config, logits), wanted, strict=True)
    return max(abs(mine.get(i, 0.0) - other.get(i, 0.0)) for mine, other in rows for i in mine.keys() | other.keys())


def describe(router: dict[str, Any]) -> str:
    """A short name for a router."""
    words = ["grouped" if router.get("use_grouped_topk") else "plain", router["scoring_func"]]
    words += ["biased"] * ("correction_bias" in router) + ["renormalizing"] * router["renormalize"]
    if router["routed_scaling_factor"]:
        words.append("scaled-on-output" if router["apply_routed_scaling_factor_on_output"] else "scaled-later")
    return " ".join(words + ["shared"] * router["shared"])


if __name__ == "__main__":
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0))
    routers = [(describe(router), router) for router in list_routers()]
    for name, router in [*routers, *((name, {"shared": 0, **router}) for name, router in list_own())]:
        config = make_config(**router)
        try:
            read_router(config)
        except ValueError as error:
            result: dict[str, Any] = {"refused": str(error)}
        else:
            try:
                result = compare(config, logits)
            except (AssertionError, RuntimeError) as error:
                result = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps({"router": name, **result}))
