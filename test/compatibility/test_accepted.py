"""Servers that are accepted, each beside the nearest one that is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compatibility.loaded import Method, config
from refused import refused
from sglang_xshare.compatibility import runners
from sglang_xshare.compatibility.modes import check_draft_tokens, check_writers
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.compatibility.schedule import check_schedule
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.layer import DROPPED

TRACE = Path("/tmp/trace.jsonl")


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
def test_only_replicas_are_several_writers_of_a_trace(flags: dict[str, Any], writers: int) -> None:
    server = SimpleNamespace(**flags)
    check_writers(None, server)
    if writers == 1:
        check_writers(TRACE, server)
    else:
        with refused(f"--expert-policy-trace {TRACE}"):
            check_writers(TRACE, server)


@pytest.mark.parametrize(("tokens", "fits"), [(1, False), (2, True), (3, False), (4, True)])
def test_draft_tokens_that_fill_the_rows_of_two_ranks_are_served(tokens: int, fits: bool) -> None:
    """Two of four ranks share out the rows of a group of data-parallel attention, padded to a multiple of two."""
    server = SimpleNamespace(tp_size=4, dp_size=1, attn_dp_size=2, speculative_algorithm="EAGLE3")
    server.speculative_num_draft_tokens = tokens
    if fits:
        check_draft_tokens(server)
    else:
        with refused(f"--speculative-num-draft-tokens {tokens}"):
            check_draft_tokens(server)


@pytest.mark.parametrize(("kmax", "fits"), [(8, True), (9, False)])
def test_rows_as_wide_as_the_models_own_are_served_with_an_all_to_all_backend(kmax: int, fits: bool) -> None:
    server = SimpleNamespace(
        **{"device": "cpu", "dp_size": 1, "tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 0},
        **{"moe_a2a_backend": "deepep", "moe_runner_backend": "auto", "max_running_requests": None},
        **{"speculative_algorithm": None, "speculative_num_draft_tokens": None, "speculative_adaptive": False},
    )
    model = MoeModel("path", "FakeMoe", 3, 64, 8, "softmax", True)
    schedule = build_schedule("oea", {"k0": 2, "kmax": kmax}, speculative=False)
    if fits:
        assert [plan.kmax for plan in check_schedule(schedule, model, server)[0]] == [kmax]
    else:
        with refused("--moe-a2a-backend deepep"):
            check_schedule(schedule, model, server)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deep_gemm_is_served_on_ranks_that_keep_an_empty_slot_empty(ranks, read, monkeypatch):
    """Before 0.5.23 one rank has no table of local experts, which an id of -1 would be looked up in."""
    monkeypatch.setattr(runners, "keeps_dropped", lambda: ranks > 1)
    (layer,) = read([config()], 1, method=Method("deep_gemm"), ep_size=ranks)
    assert layer.convention == DROPPED
