"""Servers that are accepted, each beside the nearest one that is refused."""

from pathlib import Path

import pytest

from compatibility.configured import server
from compatibility.loaded import Method, config
from refused import refused, refused_unless
from sglang_xshare.compatibility import runners
from sglang_xshare.compatibility.all_to_all import check_model
from sglang_xshare.compatibility.architectures import GATHERED
from sglang_xshare.compatibility.modes import check_draft_tokens, check_writers
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.compatibility.schedule import check_rows, check_schedule
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.layer import DROPPED

TRACE = Path("/tmp/trace.jsonl")
FOLLOWED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
"""Classes that were followed under each backend, not only deepep."""


@pytest.mark.parametrize(
    ("flags", "writers"),
    [
        ({"dp_size": 1}, 1),
        ({"dp_size": 2}, 2),
        ({"dp_size": 2, "enable_dp_attention": True}, 1),
        ({"dp_size": 1, "attn_dp_size": 2}, 1),
    ],
    ids=["one server", "replicas", "ranks of attention", "ranks of attention from 0.5.22 on"],
)
def test_only_replicas_are_several_writers_of_a_trace(flags, writers):
    check_writers(None, server(**flags))
    with refused_unless(writers == 1, f"--expert-policy-trace {TRACE}"):
        check_writers(TRACE, server(**flags))


@pytest.mark.parametrize(("tokens", "fits"), [(1, False), (2, True), (3, False), (4, True), (None, True)])
def test_draft_tokens_that_fill_the_rows_of_two_ranks_are_served(tokens, fits):
    """Two of four ranks share out the rows of a group of data-parallel attention, padded to a multiple of two."""
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": tokens}
    with refused_unless(fits, f"--speculative-num-draft-tokens {tokens}"):
        check_draft_tokens(server(tp_size=4, attn_dp_size=2, **drafts))


@pytest.mark.parametrize("attn_dp_size", [1, 2])
@pytest.mark.parametrize("adaptive", [False, True])
def test_draft_tokens_that_ranks_do_not_share_out_may_be_odd(attn_dp_size, adaptive):
    """Each of two ranks has the rows of all requests, or whole requests of its own."""
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 3, "speculative_adaptive": adaptive}
    check_draft_tokens(server(tp_size=2, attn_dp_size=attn_dp_size, **drafts))


@pytest.mark.parametrize(("tp_size", "fits"), [(1, True), (2, False)])
def test_depths_that_adapt_are_served_by_one_rank_of_an_all_to_all_backend(tp_size, fits):
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4, "speculative_adaptive": True}
    with refused_unless(fits, "--speculative-adaptive on"):
        check_draft_tokens(server(tp_size=tp_size, moe_a2a_backend="deepep", **drafts))


@pytest.mark.parametrize(("kmax", "fits"), [(8, True), (9, False)])
def test_rows_as_wide_as_the_models_own_are_served_with_an_all_to_all_backend(kmax, fits):
    model = MoeModel("path", "FakeMoe", 3, 64, 8, "softmax", True)
    schedule = build_schedule("oea", {"k0": 2, "kmax": kmax}, speculative=False)
    with refused_unless(fits, "--moe-a2a-backend deepep"):
        config = server(tp_size=2, ep_size=2, moe_a2a_backend="deepep")
        assert [plan.kmax for plan in check_schedule(schedule, model, config)[0]] == [kmax]


@pytest.mark.parametrize(("runner", "fits"), [("auto", True), ("flashinfer_mxfp4", True), ("deep_gemm", False)])
def test_rows_of_another_width_are_served_if_a_kernel_of_the_runner_takes_them(runner, fits):
    """Two of the three kernels of flashinfer_mxfp4 do; a layer shows its kernel when it loads."""
    model = MoeModel("path", "FakeMoe", 3, 64, 8, "softmax", True)
    schedule = build_schedule("oea", {"k0": 2, "kmax": 10}, speculative=False)
    with refused_unless(fits, f"--moe-runner-backend {runner}"):
        check_schedule(schedule, model, server(moe_runner_backend=runner))


@pytest.mark.parametrize("ranks", [1, 2])
def test_deep_gemm_is_served_on_ranks_that_keep_an_empty_slot_empty(ranks, read, monkeypatch):
    """Before 0.5.23 one rank has no table of local experts, which an id of -1 would be looked up in."""
    monkeypatch.setattr(runners, "keeps_dropped", lambda: ranks > 1)
    (layer,) = read([config()], 1, method=Method("deep_gemm"), ep_size=ranks)
    assert layer.convention == DROPPED


@pytest.mark.parametrize(
    ("architecture", "backend", "served"),
    [
        *((name, "deepep", name != "GptOssForCausalLM") for name in sorted(GATHERED)),
        *((name, backend, name in FOLLOWED) for name in sorted(GATHERED) for backend in ("mooncake", "nixl")),
        ("MixtralForCausalLM", "mooncake", False),
        ("MixtralForCausalLM", "none", True),
        ("MixtralForCausalLM", None, True),
    ],
)
def test_models_whose_layers_were_followed(architecture, backend, served):
    model = MoeModel("folder", architecture, 4, 64, 8, "softmax", True)
    with refused_unless(served, "--model-path folder"):
        check_model(model, server(moe_a2a_backend=backend))


def test_a_rank_alone_has_whole_requests_where_none_shares_them():
    schedule = build_schedule("xshare", {"k0": 1, "add": 0, "add_per_request": 4, "rows": "rank"}, speculative=True)
    given = {"moe_a2a_backend": "deepep", "tp_size": 4, "enable_dp_attention": True, "speculative_algorithm": "EAGLE3"}
    check_rows(schedule, server(**given, attn_dp_size=4))
    with refused("--expert-policy-config rows rank"):
        check_rows(schedule, server(**given, attn_dp_size=2))
