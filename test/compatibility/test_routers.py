"""What a loaded model's routers rule out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refused import refused
from sglang_xshare import Router, build_plan
from sglang_xshare.compatibility.layers import check_plans, check_router, count_hashed
from sglang_xshare.stage.layer import FILLED

WIDER = build_plan("oea", k0=2, kmax=6)


def check(router: Router, num_shared: int = 0, dispatch: str | None = None, gate: Any = None) -> None:
    """What the check says of a layer's router under a plan of six columns."""
    modules = {"model.layers.3.mlp.gate": gate} if gate is not None else {}
    config = SimpleNamespace(ep_dispatch_algorithm=dispatch)
    layer: Any = SimpleNamespace(router=router, num_shared=num_shared, convention=FILLED, takes_kmax=True)
    check_router("model.layers.3.mlp.topk", modules)
    check_plans(layer, [WIDER], config)


def test_more_columns_fit_a_plain_router_and_a_shared_expert_that_stays_in_its_place():
    check(Router(4))
    check(Router(4), dispatch="static")
    check(Router(4), num_shared=1, gate=SimpleNamespace(e_score_correction_bias_vl=None))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_shared": 1, "dispatch": "static"}, "^kmax = 6: .*--disable-shared-experts-fusion$"),
        ({"router": Router(4, quota_groups=2)}, "^kmax = 6: .* 2 experts of each group"),
        ({"gate": SimpleNamespace(e_score_correction_bias_vl=torch.zeros(4))}, "^DeepSeek-V4.1 "),
    ],
)
def test_what_does_not_fit_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        check(**{"router": Router(4), **arguments})


def test_on_amd_a_wider_row_would_lose_its_shared_expert(monkeypatch):
    """aiter's column is added to rows that are narrower than with it."""
    monkeypatch.setattr("sglang_xshare.compatibility.layers.routes_on", lambda flag: flag == "_use_aiter")
    check(Router(4))
    with refused("kmax = 6"):
        check(Router(4), num_shared=1)


def test_layers_that_route_by_a_hash_are_counted():
    hash_topk = pytest.importorskip("sglang.srt.layers.moe.hash_topk", reason="needs an installed SGLang")
    hashed = object.__new__(hash_topk.HashTopK)
    assert count_hashed({"model.layers.0.mlp.topk": hashed, "model.layers.3.mlp.topk": object()}) == 1
