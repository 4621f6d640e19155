"""Checks that refuse flags, backends and drafters if they do not support the expert-selection stage."""

import os
from pathlib import Path
from typing import Any

from ..policies.schedule import Schedule
from ..refusal import list_others, refusal, refuse, spell_flag, spell_value
from ..selection.cpu_call import SWITCH
from ..upstream.routing import hands_parts
from ..upstream.server import (
    attention_dp_size,
    drafter,
    is_release,
    is_speculative,
    is_switched_on,
    rank_mode,
    routes_own_rows,
    spell,
)
from .all_to_all import check_backend
from .runners import explain, list_runners

# Flags that must be off, each with the reason.
REFUSED_FLAGS = {
    "enable_deterministic_inference": "batch-aware routing is not batch-invariant",
    "enable_torch_compile": "a compiled TopK does not call the policy",
    "enable_two_batch_overlap": "the router gets half a batch",
    "enable_single_batch_overlap": "the router gets part of a batch",
    "enable_pdmux": "split prefill bypasses the policy",
    "enable_nvidia_megakernel": "the kernel routes by itself",
    "enable_amd_monokernel": "the kernel routes by itself",
    "is_embedding": "an embedding model never decodes",
    "dllm_algorithm": "blocks decode in extend forwards, which a policy treats as prefill",
    "kt_weight_path": "the CPU kernels' treatment of an empty slot is unknown",
}
DEVICES = ("cuda", "cpu")
"""Supported devices. AMD's GPUs are also "cuda".

On NPUs SGLang does not call `select_experts`. The MoE runners of all other devices have not been reviewed.
"""
# Arguments that must have these values with data-parallel attention or an all-to-all backend. Other values change which
# rows SGLang gathers, or which ranks gather rows.
RANKS_FLAGS = {
    "attn_cp_size": 1,
    "moe_dp_size": 1,
    "moe_dense_tp_size": None,
    "dwdp_size": 1,
    "elastic_ep_backend": None,
}
# Arguments that must have these values with an all-to-all backend. If disable_attn_tp_gather is on, the ranks do not
# divide the rows. If enable_waterfill is on, other code chooses experts.
ALL_TO_ALL_FLAGS = {"disable_attn_tp_gather": False, "enable_waterfill": False}
DISPATCH = "static"
"""The value of --ep-dispatch-algorithm with which all rows of a rank use the same copy of an expert."""
# If this environment variable is on, a rank does not receive the batch sizes and modes of the other ranks.
UNSYNCHRONIZED = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
# Environment variables with which SGLang overwrites the selected experts in benchmarks.
SIMULATIONS = ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS")
DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
NEWER = ("DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO")
"""Drafters that need SGLang `SINCE`. They are untested with data-parallel attention and all-to-all backends."""
SINCE = "0.5.23"
# DSpark has three modes of verification. In the two modes of `UNIFORM`, every request has the same number of rows.
MODE, UNIFORM = "SGLANG_RAGGED_VERIFY_MODE", ("static", "cap-accept")
UNRECORDED = ("DSPARK", "NGRAM", "UNO")
"""Drafters with which SGLang drops recorded experts when it verifies drafts.

With UNO, SGLang drops the experts of one token in each step.
"""
UNPREPARED = ("FROZEN_KV_MTP", "UNO")
"""Drafters that do not work on a decode server of PD disaggregation. SGLang 0.5.23 fails there at the first step."""


def check_modes(config: Any, names_runner: bool = True) -> None:
    """Raise `ExpertPolicyError` if a flag is incompatible with the expert-selection stage.

    `config` contains the resolved arguments, or the arguments as the user gave them. If `names_runner` is False, SGLang
    has chosen the MoE runner, and the function does not check the runner.
    """
    for name, reason in REFUSED_FLAGS.items():
        if value := getattr(config, name, False):
            raise refuse(name, value, f"{reason}; must be off")
    stages = getattr(config, "pp_size", 1)
    if stages > 1:
        reason = "answers would not name their policy, and only the first stage of the pipeline would report"
        raise refusal("--pp-size", stages, f"{reason}; must be 1")
    for name in SIMULATIONS:
        if is_switched_on(name):
            raise refusal(name, os.environ[name], "the switch overwrites what was selected; must be unset")
    if os.environ.get(SWITCH, "1") not in ("0", "1"):
        raise refusal(SWITCH, os.environ[SWITCH], "must be 0 (select in torch on a CPU), 1 or unset")
    device = str(getattr(config, "device", None) or DEVICES[0]).partition(":")[0]  # None until SGLang detects it
    for name, value, allowed in (
        ("device", device, DEVICES),
        ("disaggregation_mode", config.disaggregation_mode, ("null", "decode")),
    ):
        if spell(value) not in allowed:
            raise refuse(name, value, f"must be one of {', '.join(allowed)}")
    runner, runners = spell(config.moe_runner_backend), list_runners()
    if names_runner and runner not in ("auto", *runners):
        raise refusal("--moe-runner-backend", runner, f"{explain(runner)}; must be one of auto, {', '.join(runners)}")
    check_backend(config)
    _check_keys(config)
    _check_redundant_experts(config)
    if rank_mode(config) is not None:
        _check_ranks(config)
    if is_speculative(config):
        check_speculation(config)


def check_observed(schedule: Schedule | None) -> None:
    """Raise `ExpertPolicyError` if the policy is `observe` and SGLang may give layers partial sums of their logits."""
    if schedule is not None and schedule.observed and hands_parts():
        reason = "on AMD this SGLang may give a layer partial sums of its logits, and add them up later"
        raise refusal("--expert-policy", schedule.policy, f"{reason}; use another policy")


def check_writers(trace: Path | None, config: Any) -> None:
    """Raise `ExpertPolicyError` if several replicas would write the trace."""
    replicas = config.dp_size if attention_dp_size(config) == 1 else 1
    if trace is not None and replicas > 1:
        raise refusal("--expert-policy-trace", trace, f"{replicas} replicas would write the file; use one replica")


def check_draft_tokens(config: Any) -> None:
    """Raise `ExpertPolicyError` if SGLang's padding for several ranks would split the draft tokens of a request."""
    if rank_mode(config) is None or config.speculative_algorithm is None:
        return
    ranks, tokens = config.tp_size // attention_dp_size(config), config.speculative_num_draft_tokens or 0
    reason = f"SGLang pads a rank's rows to a multiple of {ranks}, its tensor-parallel ranks, and"
    if ranks > 1 and config.speculative_adaptive:
        raise refusal("--speculative-adaptive", "on", f"{reason} not every draft depth gives one; must be off")
    if tokens % ranks:
        allowed = f"must be a multiple of {ranks}"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason} padding must not split a request; {allowed}")


def _check_keys(config: Any) -> None:
    """Refuse API keys on a server with several tokenizer processes, because these processes do not check the keys."""
    workers = getattr(config, "tokenizer_worker_num", 1)
    for name in ("api_key", "admin_api_key"):
        if workers > 1 and getattr(config, name, None):
            reason = f"several tokenizer processes do not check {spell_flag(name)}; must be 1, or use no key"
            raise refusal("--tokenizer-worker-num", workers, reason)


def _check_redundant_experts(config: Any) -> None:
    """Refuse a dispatch algorithm if it would activate experts, or copies of experts, that were not selected."""
    dispatch = getattr(config, "ep_dispatch_algorithm", None)
    if dispatch == "fake":
        allowed = "must be left out, or dynamic without redundant experts"
        raise refusal("--ep-dispatch-algorithm", dispatch, f"the dispatch overwrites the router's logits; {allowed}")
    replicas = getattr(config, "ep_num_redundant_experts", 0)
    if replicas and dispatch not in (None, DISPATCH):
        allowed = f"0, or use --ep-dispatch-algorithm {DISPATCH}"
        if not routes_own_rows(config):
            allowed += " with an all-to-all backend"  # without such a backend SGLang refuses static dispatch
        reason = f"{dispatch} dispatch picks an expert's copy by row, so padding activates others; must be {allowed}"
        raise refusal("--ep-num-redundant-experts", replicas, reason)


def _check_ranks(config: Any) -> None:
    """Refuse flags that no policy supports on a server with data-parallel attention or an all-to-all backend."""
    mode = rank_mode(config)
    flags = RANKS_FLAGS | ALL_TO_ALL_FLAGS if routes_own_rows(config) else RANKS_FLAGS
    for name, value, allowed in list_others(config, flags):
        raise refuse(name, value, f"must be {spell_value(allowed)} with {mode}")
    if is_switched_on(UNSYNCHRONIZED):
        reason = f"each rank of {mode} needs the other ranks' batches; must be unset"
        raise refusal(UNSYNCHRONIZED, os.environ.get(UNSYNCHRONIZED, "on"), reason)


def check_speculation(config: Any) -> None:
    """Raise `ExpertPolicyError` if the drafter, or one of its arguments, does not support a policy."""
    algorithm = drafter(config)
    drafters = (*DRAFTERS, *NEWER) if is_release(SINCE) else DRAFTERS
    if algorithm not in drafters:
        raise refusal(
            "--speculative-algorithm", algorithm, f"must be one of {', '.join(drafters)}{_explain(algorithm)}"
        )
    if algorithm in NEWER:
        _check_newer(config, algorithm)
    if getattr(config, "enable_return_routed_experts", False):
        _check_recorded(config, algorithm, [one for one in drafters if one not in UNRECORDED])


def _check_newer(config: Any, algorithm: str) -> None:
    mode = rank_mode(config)
    if mode is not None:
        reason = f"untested with {mode}; must be one of EAGLE, EAGLE3, NEXTN{_explain(algorithm)}"
        raise refusal("--speculative-algorithm", algorithm, reason)
    if algorithm in UNPREPARED and config.disaggregation_mode == "decode":
        reason = f"{algorithm} is not supported on a PD decode server; must be null"
        raise refusal("--disaggregation-mode", "decode", reason)
    verified = os.environ.get(MODE, UNIFORM[0])
    if algorithm == "DSPARK" and verified not in UNIFORM:
        raise refusal(MODE, verified, f"a policy groups rows by request; must be {', '.join(UNIFORM)} or unset")
    breadth = getattr(config, "speculative_eagle_topk", None)
    if algorithm in UNPREPARED and (breadth or 1) > 1:
        raise refusal("--speculative-eagle-topk", breadth, f"{algorithm}'s trees are untested; must be 1")
    tokens = getattr(config, "speculative_num_draft_tokens", None)
    if algorithm == "UNO" and tokens == 1:
        reason = "with one token UNO drafts nothing, and replays one graph for both of its forwards"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason}; must be at least 2")


def _check_recorded(config: Any, algorithm: str, allowed: list[str]) -> None:
    """Refuse --enable-return-routed-experts if SGLang would return wrong experts.

    With some drafters SGLang drops recorded experts. With a tree of drafts, SGLang moves the keys and values of the
    accepted path to other cache entries. It does not move the recorded experts, so these entries have the experts of
    other drafts.
    """
    if algorithm in UNRECORDED:
        reason = "--enable-return-routed-experts would return other experts, because SGLang drops what it has recorded"
        raise refusal("--speculative-algorithm", algorithm, f"{reason}; must be one of {', '.join(allowed)}")
    breadth = getattr(config, "speculative_eagle_topk", None)
    if (breadth or 1) > 1:
        reason = "--enable-return-routed-experts would return experts of drafts that were not accepted; must be 1"
        raise refusal("--speculative-eagle-topk", breadth, reason)


def _explain(algorithm: str) -> str:
    """Return a hint for the end of an error line if SGLang may have replaced the algorithm that the user set."""
    if algorithm != "FROZEN_KV_MTP":
        return ""
    return "; SGLang turns NEXTN and EAGLE into FROZEN_KV_MTP for this draft, so give another draft"
