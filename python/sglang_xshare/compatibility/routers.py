"""What a loaded model's routers rule out: of the plans, and of what its layers hold beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..policies.plan import SelectionPlan
from ..selection.mask import check_maskable
from ..stage.layer import MASKED, Layer
from ..upstream.routing import routes_on


def check_router(name: str, modules: Mapping[str, Any]) -> None:
    """Raise ValueError where the router `name` is not the only one of its layer; `modules` are the model's by name."""
    gate = modules.get(f"{name.rpartition('.')[0]}.gate")
    if getattr(gate, "e_score_correction_bias_vl", None) is not None:
        raise ValueError("DeepSeek-V4.1 routes by another function where it takes images; allowed is a model without")


def check_plans(layer: Layer, plans: Sequence[SelectionPlan], config: Any) -> None:
    """Raise ValueError for a plan that a layer's router or runner does not fit, of a server that starts or that is
    switched. `config` holds its resolved arguments.
    """
    for plan in plans:
        if layer.convention == MASKED:
            check_maskable(plan, layer.router)
        plan.check_columns(layer.router)
        plan.check_weights(layer.router)
        wider = plan.columns(layer.router) != layer.router.top_k
        if wider and not layer.takes_kmax:
            raise ValueError(f"kmax = {plan.kmax}: the layers' MoE runner uses top-k; allowed is {layer.router.top_k}")
        if wider and layer.num_shared and (config.ep_dispatch_algorithm is not None or routes_on("_use_aiter")):
            # Upstream tells a shared expert's column by the width alone: it would look its number up among the routed,
            # or not add it.
            raise ValueError(
                f"kmax = {plan.kmax}: upstream would take its fused shared expert for one of the routed; allowed is "
                f"{layer.router.top_k}, or --disable-shared-experts-fusion"
            )


def count_hashed(modules: Mapping[str, Any]) -> int:
    """How many MoE layers choose by a hash of the token (DeepSeek-V4's first ones): nothing is selected there."""
    from sglang.srt.layers.moe.hash_topk import HashTopK

    return sum(isinstance(module, HashTopK) for module in modules.values())
