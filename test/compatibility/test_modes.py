"""Flags and backends that are refused, where it takes no release to resolve them, and the nearest that are served."""

from pathlib import Path
from typing import Any

import pytest

from compatibility.configured import HIDDEN, server
from refused import refused, refused_unless
from sglang_xshare.compatibility import modes
from sglang_xshare.compatibility.all_to_all import BACKENDS, REASONS, check_model
from sglang_xshare.compatibility.architectures import GATHERED
from sglang_xshare.compatibility.modes import MODE, NEWER, SIMULATIONS, UNPREPARED, UNRECORDED, UNSYNCHRONIZED
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.selection.cpu_call import SWITCH

ALL_TO_ALL = {"moe_a2a_backend": "deepep"}
REPLICAS = {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic"}
ROUTED = {"enable_return_routed_experts": True}
OLDER = "a release before"
TOKENS = "speculative_num_draft_tokens"
DRAFTS = {"speculative_algorithm": "EAGLE3", TOKENS: 4}
TWO_RANKS = {**DRAFTS, "tp_size": 4, "attn_dp_size": 2}
"""Two of four ranks share out the rows of a group of data-parallel attention, padded to a multiple of two."""
# Arguments, beside those of a server that is served.
REFUSED: dict[str, dict[str, Any]] = {
    **{f"simulated routing by {name}": {name: "true"} for name in SIMULATIONS},
    "simulated routing, said shorter": {SIMULATIONS[0]: "y"},
    "a switch that is neither on nor off": {SWITCH: "off"},
    **{f"device {device}": {"device": device} for device in ("npu", "xpu", "musa:0")},
    "experts on a CPU beside a GPU": {"kt_weight_path": "folder"},
    "a whole model in a kernel": {"enable_nvidia_megakernel": True},
    "a whole model in a kernel of AMD's": {"enable_amd_monokernel": True},
    "blocks of tokens": {"dllm_algorithm": "LowConfidence"},
    "ranks that are not synchronized": {UNSYNCHRONIZED: "1", "attn_dp_size": 2},
    "ranks of all-to-all that are not": {UNSYNCHRONIZED: "1", **ALL_TO_ALL},
    "replicas by a plan": {**REPLICAS, "ep_dispatch_algorithm": "lp"},
    "replicas by the row with all-to-all": {**REPLICAS, **ALL_TO_ALL},
    **{
        f"all-to-all by {backend}": {"moe_a2a_backend": backend}
        for backend in (*REASONS, "flashinfer", "mori", "customized")
    },
    "dense layers of their own": {**ALL_TO_ALL, "moe_dense_tp_size": 1},
    "context parallelism": {**ALL_TO_ALL, "attn_cp_size": 2},
    "rows that are not gathered": {**ALL_TO_ALL, "disable_attn_tp_gather": True},
    "waterfill": {**ALL_TO_ALL, "enable_waterfill": True, "attn_dp_size": 2},
    "routed experts of a draft tree": {**ROUTED, "speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 2},
    **{f"routed experts of {drafter}": {**ROUTED, "speculative_algorithm": drafter} for drafter in UNRECORDED},
    **{
        f"{drafter} after another server's prefill": {"disaggregation_mode": "decode", "speculative_algorithm": drafter}
        for drafter in UNPREPARED
    },
    "a drafter that is none": {"speculative_algorithm": "MEDUSA"},
    **{f"{OLDER} {drafter}": {"speculative_algorithm": drafter} for drafter in NEWER},
    **{f"{drafter} on ranks of attention": {"speculative_algorithm": drafter, "attn_dp_size": 2} for drafter in NEWER},
    "blocks with all-to-all": {"speculative_algorithm": "DFLASH", **ALL_TO_ALL},
    "ragged verify": {"speculative_algorithm": "DSPARK", MODE: "compact"},
    "a misspelt verify": {"speculative_algorithm": "DSPARK", MODE: "statik"},
    "UNO of one token": {"speculative_algorithm": "UNO", TOKENS: 1},
    **{f"{drafter}'s trees": {"speculative_algorithm": drafter, "speculative_eagle_topk": 2} for drafter in UNPREPARED},
    **{f"{tokens} draft tokens on two ranks": {**TWO_RANKS, TOKENS: tokens} for tokens in (1, 3)},
    "depths that adapt with all-to-all": {**DRAFTS, **ALL_TO_ALL, "speculative_adaptive": True, "tp_size": 2},
    "a drafter as SGLang takes it, too": {"speculative_algorithm": "dspark", MODE: "compact"},
    "api_key that nobody is asked for": {"tokenizer_worker_num": 2, "api_key": "secret"},
    "admin_api_key that nobody is asked for": {"tokenizer_worker_num": 2, "admin_api_key": "secret"},
}


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    if case.startswith(OLDER):
        monkeypatch.setattr("sglang_xshare.compatibility.modes.is_release", lambda since: False)
    check(REFUSED[case], monkeypatch)


def check(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in given:
        if name.isupper():
            monkeypatch.setenv(name, given[name])
    modes.check_modes(server(**given))
    modes.check_draft_tokens(server(**given))


@pytest.mark.parametrize(
    "changes",
    [
        {**ROUTED, "speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
        {**ROUTED, "speculative_algorithm": "EAGLE3", "speculative_eagle_topk": None},
        {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 2},
        *({"speculative_algorithm": drafter, "speculative_num_draft_tokens": 2} for drafter in NEWER),
        *({**ROUTED, "speculative_algorithm": drafter} for drafter in NEWER if drafter not in UNRECORDED),
        *({"disaggregation_mode": "decode", "speculative_algorithm": drafter} for drafter in ("EAGLE3", "DFLASH")),
        {"speculative_algorithm": "eagle3"},
        {**HIDDEN, "speculative_algorithm": "DFLASH", **ALL_TO_ALL},
        {"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 2, TOKENS: 1},
        {"speculative_algorithm": "UNO"},
        {UNSYNCHRONIZED: "1"},  # of one rank, nothing to synchronize
        {UNSYNCHRONIZED: "0", "attn_dp_size": 2},
        {"attn_dp_size": 2, "disable_attn_tp_gather": True, "enable_waterfill": True},
        {SIMULATIONS[0]: "false"},
        *({SWITCH: value} for value in ("0", "1")),
        *({"device": device} for device in (None, "cuda:0")),
        {"moe_a2a_backend": None},
        # Modes of verification without ragged requests.
        *({"speculative_algorithm": "DSPARK", MODE: mode} for mode in ("static", "cap-accept")),
        *({"speculative_algorithm": drafter, MODE: "compact"} for drafter in ("DFLASH", "EAGLE")),
        *({**TWO_RANKS, TOKENS: tokens} for tokens in (2, 4, None)),
        DRAFTS | ALL_TO_ALL | {"speculative_adaptive": True},
        # Each of two ranks has the rows of all requests, or whole requests of its own.
        *(
            {**DRAFTS, TOKENS: 3, "speculative_adaptive": adaptive, "tp_size": 2, **attention}
            for adaptive in (False, True)
            for attention in ({}, {"attn_dp_size": 2})
        ),
        *({"moe_runner_backend": name} for name in ("flashinfer_trtllm", "flashinfer_mxfp4")),
        {"tokenizer_worker_num": 2},
        {"admin_api_key": "secret"},
        *({"moe_a2a_backend": backend} for backend in BACKENDS),
        *({"ep_num_redundant_experts": 0, "ep_dispatch_algorithm": dispatch} for dispatch in ("dynamic", "lp")),
        {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "static"},
    ],
    ids=str,
)
def test_what_is_served(changes, monkeypatch):
    check(changes, monkeypatch)


def test_a_runner_that_sglang_has_chosen_is_left_to_the_check_of_experts():
    modes.check_modes(server(moe_runner_backend="flashinfer_cutedsl"), names_runner=False)


TRACE = Path("/tmp/trace.jsonl")


def test_only_replicas_are_several_writers_of_a_trace():
    attention = {"dp_size": 2, "enable_dp_attention": True}, {"dp_size": 1, "attn_dp_size": 2}  # the latter from 0.5.22
    for one_writer in ({"dp_size": 1}, *attention):
        modes.check_writers(TRACE, server(**one_writer))
    modes.check_writers(None, server(dp_size=2))
    with refused(f"--expert-policy-trace {TRACE}"):
        modes.check_writers(TRACE, server(dp_size=2))


FOLLOWED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
"""Classes that were followed under each backend, not only deepep."""


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
    with refused_unless(served, "--model-path folder"):
        check_model(MoeModel("folder", architecture, 4, 64, 8, "softmax", True), server(moe_a2a_backend=backend))
