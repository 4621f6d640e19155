"""A layer under policy: upstream's routers read, and upstream's own result at full budget."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from served.release import LATEST, interpret, older_releases_take_long, run_script
from sglang_xshare.types import SCORINGS
from sglang_xshare.upstream import router as stage_router
from sglang_xshare.upstream.router import read_router


def config(**changes: Any) -> SimpleNamespace:
    plain = {
        "top_k": 8,
        "scoring_func": "softmax",
        "renormalize": True,
        "correction_bias": None,
        "use_grouped_topk": False,
        "num_expert_group": None,
        "topk_group": None,
        "custom_routing_function": None,
        "num_fused_shared_experts": 0,
    }
    return SimpleNamespace(**plain | changes)


GROUPED = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
BIAS = torch.zeros(64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"custom_routing_function": print}, "a routing function of the model's own"),
        ({"scoring_func": "tanh"}, "scoring function 'tanh'"),
        (
            {"top_k": 9, "num_fused_shared_experts": 1},
            r"1 fused shared experts in a router that is ungrouped \(softmax\); must be",
        ),
        (
            {"top_k": 9, "num_fused_shared_experts": 1, "renormalize": False, **GROUPED},
            "1 fused shared experts in a router that is grouped, not renormalizing \\(softmax\\); must be",
        ),
        (
            {"top_k": 10, "num_fused_shared_experts": 2, **GROUPED},
            "2 fused shared experts in a router that is grouped \\(softmax\\); must be",
        ),
    ],
)
def test_router_that_cannot_be_reproduced_is_refused(changes, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        read_router(config(**changes))


@pytest.mark.parametrize("adds", [True, False])
def test_a_bias_on_softmax_scores_counts_where_upstream_adds_it(adds, monkeypatch):
    """ERNIE 4.5's, [1, N] but on a CPU: CUDA's and ROCm's kernels are not given it."""
    monkeypatch.setattr(stage_router, "routes_on", lambda flag: adds and flag == "_is_cpu")
    found = read_router(config(correction_bias=BIAS.unsqueeze(0))).correction_bias
    assert (found is None) is not adds
    assert found is None or found.data_ptr() == BIAS.data_ptr()


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_a_shared_expert_without_groups(scoring, monkeypatch):
    """As in MiniMax-M3, where upstream's CUDA kernel writes its column."""
    shared = config(top_k=9, scoring_func=scoring, correction_bias=BIAS, num_fused_shared_experts=1)
    monkeypatch.setattr(stage_router, "routes_on", lambda flag: flag == "_is_cuda")
    assert read_router(shared).top_k == 8
    for changes in ({"scoring_func": "softmax", "correction_bias": None}, {"renormalize": False}):
        with pytest.raises(ValueError, match=r"^1 fused shared experts in a router that is ungrouped"):
            read_router(SimpleNamespace(**vars(shared) | changes))
    monkeypatch.setattr(stage_router, "routes_on", lambda flag: False)
    with pytest.raises(ValueError, match=f"in a router that is ungrouped \\({scoring}\\)"):
        read_router(shared)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_grouped_router_with_a_bias_scores_by_sigmoids_whatever_its_config_says(scoring):
    """As GLM-4-MoE's, which leaves the default; without a bias it scores as its config says."""
    assert read_router(config(scoring_func=scoring, correction_bias=BIAS, **GROUPED)).scoring == "sigmoid"
    assert read_router(config(scoring_func=scoring, **GROUPED)).scoring == scoring
    ungrouped = read_router(config(scoring_func=scoring, **GROUPED | {"use_grouped_topk": False}))
    assert (ungrouped.num_expert_group, ungrouped.topk_group) == (None, None)


def test_a_release_that_renormalizes_what_should_not_be_is_refused(monkeypatch):
    """0.5.17 and 0.5.21 on CUDA, as far as FlashInfer's kernel serves."""
    quirk = config(correction_bias=BIAS, renormalize=False, **GROUPED)
    assert not read_router(quirk).renormalize
    monkeypatch.setattr(stage_router, "renormalizes_biased_groups", lambda: True)
    with pytest.raises(ValueError, match="grouped router with a bias must renormalize"):
        read_router(quirk)
    assert read_router(config(correction_bias=BIAS, **GROUPED)).renormalize


@cache
def compare(tree: Path) -> dict[str, dict[str, Any]]:
    """What `compare_routing.py` found on a release, by router."""
    # Upstream compiles its torch routers, which takes a minute; here they run eagerly.
    lines = run_script(Path(__file__).with_name("compare_routing.py"), interpret(tree))
    return {line.pop("router"): line for line in lines}


PLAIN = [f"plain {scoring}{biased}" for scoring in SCORINGS for biased in ("", " biased")]
OWN = [
    f"{model}{renormalizing}"
    for model in ("AFMoE", "Cohere 2", "InternS1-Pro")
    for renormalizing in (" renormalizing", "")
] + ["Gemma 4", "Llama 4"]
"""Routing functions of models' own."""
SERVED = [
    f"{router}{renormalizing}{scaled}"
    for router in PLAIN
    for renormalizing in (" renormalizing", "")
    for scaled in ("", " scaled-later")
] + [
    f"{router}{renormalizing}{scaled}"
    for router in ("grouped softmax", "grouped softmax biased", "grouped sigmoid", "grouped sigmoid biased")
    for renormalizing in (" renormalizing", "")
    for scaled in ("", " scaled-later", " scaled-on-output")
]
SHARED = [
    f"{router} renormalizing {scaled} shared"
    for router in ("grouped softmax", "grouped softmax biased", "grouped sigmoid", "grouped sigmoid biased")
    for scaled in ("scaled-later", "scaled-on-output")
]
PLAIN_SCALED_ON_OUTPUT = [
    f"{router}{renormalizing} scaled-on-output" for router in PLAIN for renormalizing in (" renormalizing", "")
]


@older_releases_take_long
def test_full_budget_is_upstreams_own_routing(release, patched_release):
    """Ids as sets, weights to 1e-5, for vanilla, xshare and oea at full budget, and for kmax all columns' scaling."""
    found = compare(patched_release(release))
    wrong = [
        (router, found[router])
        for router in SERVED + SHARED + OWN
        if found[router].get("rows_apart") != 0 or max(found[router]["error"], found[router]["wider"]) > 1e-5
    ]
    assert wrong == []


@older_releases_take_long
def test_scaling_of_plain_routers_on_output(release, patched_release):
    """From 0.5.22 on as upstream does; before, its torch routers do not implement it without the stage either."""
    found = compare(patched_release(release))
    for router in PLAIN_SCALED_ON_OUTPUT:
        if release == LATEST:
            assert found[router]["rows_apart"] == 0
            assert found[router]["error"] <= 1e-5
        else:
            assert found[router] == {"raised": "AssertionError: Not implemented"}


@older_releases_take_long
def test_every_other_router_is_refused(release, patched_release):
    found = compare(patched_release(release))
    others = found.keys() - set(SERVED + SHARED + OWN + PLAIN_SCALED_ON_OUTPUT)
    assert len(others) == 32
    for router in others:
        assert "shared experts" in found[router]["refused"]
