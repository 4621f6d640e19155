"""What the stage can serve: checked against the resolved arguments and the model, before weights load."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn

from ..patching.errors import PatchError
from ..patching.status import check_patched
from ..plan import SelectionPlan
from ..policies import VANILLA
from ..policies.schedule import Schedule
from ..types import Router
from .alignment import check_aligned
from .arguments import Arguments, ExpertPolicyError
from .draft import check_draft, read_draft
from .mask import check_maskable
from .upstream import attention_dp_size, is_switched_on, model_config, resolved

logger = logging.getLogger(__name__)

# Models whose every MoE layer routes through `TopK` with a softmax or sigmoid router the stage reproduces. Others have
# a routing function of their own (Llama 4, Grok, Phi, Gemma), a bias a token (Bailing) or on softmax scores (ERNIE), or
# route before TopK (Kimi K3).
ARCHITECTURES = frozenset(
    {
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
# Speculation whose verify batch is request-major with one length for all requests. DSpark's ragged verify is not.
SPECULATION = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
# Flags that let a batch pass the stage by, or make its rows something else than this rank's requests.
REFUSED_FLAGS = {
    "enable_deterministic_inference": "batch-aware routing is not batch-invariant",
    "enable_torch_compile": "a compiled TopK does not call the stage",
    "enable_two_batch_overlap": "the router sees half a batch",
    "enable_single_batch_overlap": "the router sees part of a batch",
    "enable_pdmux": "split prefill passes the stage by",
    "enable_nvidia_megakernel": "it routes inside its kernel",
    "enable_amd_monokernel": "it routes inside its kernel",
    "is_embedding": "it never decodes",
}
# Models that upstream's data-parallel attention does not know: their ranks share out the attention heads of every row,
# and would add up those of different requests.
WHOLE_ATTENTION = frozenset({"DeepseekForCausalLM", "GraniteMoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM"})
# What would change which rows data-parallel attention gathers for the router, or which ranks gather them: by flag, what
# is allowed with it.
DP_ATTENTION_FLAGS = {
    "attn_cp_size": 1,
    "moe_dp_size": 1,
    "moe_dense_tp_size": None,
    "dwdp_size": 1,
    "elastic_ep_backend": None,
}
# With it no rank knows what the others do in a step.
UNSYNCHRONIZED = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
# Runners that take ids and weights from `select_experts`, or logits (triton_kernel). Others route in their kernel, or
# need a row's ids to be distinct, which those in empty slots are not: deep_gemm sizes its buffers by that, and
# flashinfer_cutlass looks for one place of an expert in a row.
RUNNERS = ("triton", "triton_kernel", "cutlass", "marlin")
# Upstream's benchmark switches, which overwrite what was selected.
SIMULATIONS = ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS")
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k")
# With which a scheduler process ends when it refuses the loaded model; it has said why.
REFUSED = 78


def check_tree() -> None:
    """Raise `ExpertPolicyError` unless the SGLang that runs is wholly patched by this version of the queue."""
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(f"--expert-policy: {error}") from None


def check_modes(config: Any) -> None:
    """Raise `ExpertPolicyError` for a flag the stage cannot be served with; `config` is resolved or as it was given."""
    for flag, reason in REFUSED_FLAGS.items():
        if getattr(config, flag, False):
            raise refusal(f"--{flag.replace('_', '-')}", "on", f"{reason}; allowed is off")
    for name in SIMULATIONS:
        if is_switched_on(name):
            raise refusal(name, os.environ[name], "it overwrites what was selected; allowed is unset")
    _check_choice("--disaggregation-mode", config.disaggregation_mode, ("null", "decode"))
    if _name(config.moe_runner_backend) != "auto":  # which SGLang may have resolved to one that is not allowed
        _check_choice("--moe-runner-backend", config.moe_runner_backend, RUNNERS)
    _check_choice("--moe-a2a-backend", config.moe_a2a_backend, ("none",))
    if attention_dp_size(config) > 1:
        _check_dp_attention(config)
    if config.speculative_algorithm is not None:
        _check_choice("--speculative-algorithm", config.speculative_algorithm, SPECULATION)


def check_server(server_args: Any, arguments: Arguments) -> None:
    """Raise `ExpertPolicyError` for a model, backend or mode it cannot serve; warn of a plan that drops nothing."""
    config = resolved(server_args)
    check_modes(config)
    if arguments.align:
        try:
            check_aligned(config)
        except ValueError as error:
            raise ExpertPolicyError(f"--expert-policy-align: {error}") from None
    model = model_config(server_args)
    num_experts, top_k = read_model(model, server_args.model_path)
    architecture = model.hf_config.architectures[0]
    if attention_dp_size(config) > 1 and architecture in WHOLE_ATTENTION:
        reason = f"{architecture} has no data-parallel attention in SGLang; allowed is a model that has"
        raise refusal("--model-path", server_args.model_path, reason)
    _check_draft(config, model.hf_text_config)
    _check_draft_tokens(config)
    if arguments.trace is not None and config.dp_size > 1 and attention_dp_size(config) == 1:
        raise refusal(
            "--expert-policy-trace", arguments.trace, f"{config.dp_size} replicas would write it; allowed is one"
        )
    plans = [VANILLA]
    if arguments.schedule is not None:
        _check_size(arguments.schedule, config)
        plans = _check_plans(arguments.schedule, Router(top_k=top_k), num_experts, model.num_hidden_layers, config)
    if _name(config.moe_runner_backend) == "triton_kernel":
        _check_maskable(plans, model.hf_text_config, top_k)


def read_model(model: Any, path: str) -> tuple[int, int]:
    """(number of routed experts, top-k) of a model's configuration. Raises for a dense or an unknown model."""
    text_config = model.hf_text_config
    num_experts = next((n for name in NUM_EXPERTS if (n := getattr(text_config, name, None))), 0)
    top_k = next((k for name in TOP_K if (k := getattr(text_config, name, None))), 0)
    architecture = model.hf_config.architectures[0]
    if num_experts < 2 or not top_k:
        raise refusal("--model-path", path, f"{architecture} is a dense model; allowed are Mixture-of-Experts models")
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(sorted(ARCHITECTURES))
        raise refusal("--model-path", path, f"the router of {architecture} is not supported; allowed are {allowed}")
    return num_experts, top_k


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """One line: the flag, its value, why an expert policy cannot be served with it, and what is allowed."""
    return ExpertPolicyError(f"{flag} {value}: cannot be served with an expert policy: {reason}")


def end_refused(error: ExpertPolicyError) -> NoReturn:
    """End a scheduler process that refuses its loaded model: SGLang would log a traceback and kill the server.

    Every tensor-parallel rank refuses alike, so that only the first says its line.
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        print(error, file=sys.stderr, flush=True)
    raise SystemExit(REFUSED) from None


def check_exit(code: int | None) -> None:
    """In the server's process, for a scheduler that died: raise `ExpertPolicyError` where it has refused its model.

    The line is said, so that uncaught this one ends the server with status 1 and no other word.
    """
    if code == REFUSED:
        error = ExpertPolicyError("--expert-policy: the scheduler refused the loaded model and said why")
        error.code = 1
        raise error


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))


def _check_choice(flag: str, value: Any, allowed: tuple[str, ...]) -> None:
    if _name(value) not in allowed:
        raise refusal(flag, value, f"allowed is {', '.join(allowed)}")


def _check_dp_attention(config: Any) -> None:
    """Refuse what data-parallel attention cannot be served with."""
    for flag, allowed in DP_ATTENTION_FLAGS.items():
        value = getattr(config, flag, allowed)
        if value != allowed:
            reason = f"allowed with data-parallel attention is {'none' if allowed is None else allowed}"
            raise refusal(f"--{flag.replace('_', '-')}", value, reason)
    if is_switched_on(UNSYNCHRONIZED):
        reason = "ranks of data-parallel attention would not know what the others do; allowed is unset"
        raise refusal(UNSYNCHRONIZED, os.environ.get(UNSYNCHRONIZED, "on"), reason)


def _check_draft_tokens(config: Any) -> None:
    """Refuse verification under data-parallel attention whose requests would not fill a rank's rows."""
    shares, tokens = attention_dp_size(config), config.speculative_num_draft_tokens or 0
    ranks = config.tp_size // shares
    if shares > 1 and config.speculative_algorithm is not None and tokens % ranks:
        reason = f"SGLang pads a rank's rows to its {ranks} tensor-parallel ranks, which must not split a request"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason}; allowed is a multiple of {ranks}")


def _check_draft(config: Any, target: Any) -> None:
    try:
        draft = read_draft(config)
        if draft is not None:
            check_draft(draft, target, _name(config.speculative_algorithm))
    except ValueError as error:
        path = config.speculative_draft_model_path
        raise ExpertPolicyError(f"--speculative-draft-model-path {path}: {error}") from None


def _check_maskable(plans: list[SelectionPlan], text_config: Any, top_k: int) -> None:
    """Refuse what the triton_kernel runner's own ranking cannot express, as far as the configuration tells."""
    scoring = getattr(text_config, "scoring_func", None) or "softmax"
    renormalize = getattr(text_config, "norm_topk_prob", True)
    try:
        for plan in plans:
            check_maskable(plan, Router(top_k=top_k, scoring=scoring, renormalize=renormalize))
    except ValueError as error:
        raise refusal("--moe-runner-backend", "triton_kernel", str(error)) from None


def _check_size(schedule: Schedule, config: Any) -> None:
    """Refuse a server whose every batch is too small or too large for the policy."""
    requests, tokens = config.max_running_requests, config.speculative_num_draft_tokens or 1
    if schedule.max_tokens is not None and schedule.max_tokens < tokens and not config.speculative_adaptive:
        reason = f"every batch would have more than max_tokens = {schedule.max_tokens} rows; allowed is at most that"
        raise refusal("--speculative-num-draft-tokens", tokens, reason)
    # Each rank pads its rows to those of the rank with most.
    ranks = attention_dp_size(config)
    if schedule.max_tokens is not None and schedule.max_tokens < ranks * tokens:
        reason = f"most batches of {ranks} ranks have more rows; allowed is at least {ranks * tokens}"
        raise refusal("--expert-policy-config max_tokens", schedule.max_tokens, reason)
    rows = (requests or schedule.min_tokens) * tokens
    if rows < schedule.min_tokens:
        reason = f"no batch would have min_tokens = {schedule.min_tokens} rows; allowed is at least that"
        raise refusal("--max-running-requests", requests, reason)


def _check_plans(
    schedule: Schedule, router: Router, num_experts: int, num_layers: int, config: Any
) -> list[SelectionPlan]:
    """Every plan the model's layers can get, checked against the model; warn of one that never drops an expert."""
    try:
        plans = schedule.plans(range(num_layers))
        for plan in plans:
            plan.check(router, num_experts, ranks=config.ep_size)
    except ValueError as error:
        raise ExpertPolicyError(f"--expert-policy {schedule.policy}: {error}") from None
    moves = config.init_expert_location != "trivial" or config.enable_eplb or config.ep_num_redundant_experts
    for plan in plans:
        if plan.target_per_rank is not None and moves:
            flags = "--enable-eplb / --init-expert-location / --ep-num-redundant-experts"
            raise refusal(
                flags, "set", "target_per_rank needs every expert in one fixed place; allowed is none of them"
            )
        if plan.kmax not in (None, router.top_k) and config.enable_return_routed_experts:
            reason = f"kmax = {plan.kmax} gives it rows of another width; allowed is off"
            raise refusal("--enable-return-routed-experts", "on", reason)
        if not plan.can_drop(router, num_experts, ranks=config.ep_size):
            logger.warning("--expert-policy %s: this plan never drops one of %d experts", schedule.policy, num_experts)
    return plans
