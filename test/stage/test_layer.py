"""A layer under policy: upstream's routers read, and upstream's own result at full budget."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from served.release import LATEST, older_releases_take_long
from sglang_xshare.types import SCORINGS
from sglang_xshare.upstream import router as stage_router
from sglang_xshare.upstream.router import read_router
from stage.fake import Config

config = partial(Config, top_k=8)
GROUPED = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
BIAS = torch.zeros(64)
ONE_SHARED = {"top_k": 9, "num_fused_shared_experts": 1}
SHARED = "fused shared experts in a router that is"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"custom_routing_function": print}, "a routing function of the model's own"),
        ({"scoring_func": "tanh"}, "scoring function 'tanh'"),
        (ONE_SHARED, rf"1 {SHARED} ungrouped \(softmax\); must be"),
        (ONE_SHARED | GROUPED | {"renormalize": False}, rf"1 {SHARED} grouped, not renormalizing \(softmax\); must be"),
        ({"top_k": 10, "num_fused_shared_experts": 2, **GROUPED}, rf"2 {SHARED} grouped \(softmax\); must be"),
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
    shared = config(scoring_func=scoring, correction_bias=BIAS, **ONE_SHARED)
    monkeypatch.setattr(stage_router, "routes_on", lambda flag: flag == "_is_cuda")
    assert read_router(shared).top_k == 8
    for changes in ({"scoring_func": "softmax", "correction_bias": None}, {"renormalize": False}):
        with pytest.raises(ValueError, match=f"^1 {SHARED} ungrouped"):
            read_router(replace(shared, **changes))
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


def is_refused(router: str) -> bool:
    return "shared" in router and not ("grouped" in router and "renormalizing" in router)


def has_no_reference(release: str, router: str) -> bool:
    """Before 0.5.22 upstream's torch routers do not implement it without the stage either."""
    return release != LATEST and "plain" in router and "scaled-on-output" in router


@older_releases_take_long
def test_full_budget_is_upstreams_own_routing(release, ask):
    """Ids as sets, weights to 1e-5, for vanilla, xshare and oea at full budget, and for kmax all columns' scaling.
    Shared experts are served in grouped routers that renormalize, and in no other.
    """
    # Upstream compiles its torch routers, which takes a minute; here they run eagerly.
    found = {line["router"]: line for line in ask("compare_routing.py", release)}
    refused = {router: line["refused"] for router, line in found.items() if is_refused(router)}
    assert (len(found), len(refused)) == (10 * 2 * 5 + 8, 32)
    assert all("shared experts" in reason for reason in refused.values())
    for router in found.keys() - refused:
        if has_no_reference(release, router):
            assert found[router]["raised"] == "AssertionError: Not implemented", router
        else:
            assert found[router].get("rows_apart") == 0, (router, found[router])
            assert max(found[router]["error"], found[router]["wider"]) <= 1e-5, (router, found[router])
