"""The treatment of empty slots by each MoE runner, with the upstream code that shows it.

A slot is a column of a row's expert ids and weights. A row with fewer experts than top-k has empty slots, which each
runner needs in another form, its `Convention` (`stage.layer`).

Files are SGLang's, from `sglang/` on, in release 0.5.23 and, unless noted, alike in 0.5.17 and 0.5.21; files in `csrc/`
and `include/` are FlashInfer's, in the releases that these three pin (0.6.15.post1, 0.6.18, 0.7.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..stage.layer import DROPPED, FILLED, MASKED, Convention
from ..upstream.routing import find_runner, gathers_routed, keeps_dropped, leaves_sums
from ..upstream.server import is_release


@dataclass(frozen=True)
class Runner:
    """One kernel behind a name of --moe-runner-backend."""

    name: str
    convention: Convention
    since: str = "0.5.17"
    """The first release with this treatment."""
    takes_kmax: bool = True
    """False if the kernel takes the model's top-k for the number of columns."""
    methods: tuple[str, ...] = ()
    """Classes of quantization methods or schemes whose code was read to call this kernel; empty if all call it."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that distinguish kernels, for a method that has them."""

    def runs(self, layer: Any) -> bool:
        """Return whether an upstream `FusedMoE` with a runner of this name runs its experts with this kernel."""
        method: Any = getattr(layer, "quant_method", None)
        kinds = {kind.__name__ for owner in (method, getattr(layer, "scheme", None)) for kind in type(owner).__mro__}
        marked = all(getattr(method, name, value) == value for name, value in self.marks.items())
        return marked and (not self.methods or not kinds.isdisjoint(self.methods))


# csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_custom.cuh, `expertIdx > -1`, and `isLocalExpert` in
# include/flashinfer/trtllm/fused_moe/RoutingKernel.cuh: -1 gets permuted index -1, which finalizeKernel skips; threads
# with the same expert of a row race to write. `marks` excludes Fp8MoEMethod with one scale for a whole tensor.
_TRTLLM_METHODS = ("UnquantizedFusedMoEMethod", "Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod")
_TRTLLM = partial(Runner, convention=DROPPED, takes_kmax=False, marks={"block_quant": True})
_MXFP4 = partial(Runner, "flashinfer_mxfp4", since="0.5.23", methods=("Mxfp4MoEMethod",))
# moe_align_block_size sorts every slot by itself, so a row may have an expert twice; -1 is read unless experts are
# filtered. Also for layers without `FusedMoE`, as in DeepSeek's first model.
TRITON = Runner("triton", FILLED)
TABLE = (
    TRITON,
    Runner("marlin", FILLED),  # fused_marlin_moe sorts by moe_align_block_size, as triton does
    Runner("cutlass", FILLED),  # cutlass_moe.py: prepare_moe_input counts and places every slot by itself; -1 is read
    # moe/topk.py, `routing(router_logits, ...)` of triton_kernels: top-k, then softmax, a row's experts in bits
    Runner("triton_kernel", MASKED, takes_kmax=False),
    # kernels/ops/moe/ep_moe_kernels.py: `valid` in fused_moe_dispatch_index and ep_scatter, `dst_idx >= 0` in
    # fill_gateup_input and post_reorder_deepgemm (0.5.17: `expert_id >= 0` in all of them), which steps by
    # runner_config.top_k; an expert has m_max rows, each row of the batch once
    Runner("deep_gemm", DROPPED, takes_kmax=False),
    # csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh: `is_valid_expert`, `expert_id == target_expert_id`
    # and finalizeMoeRoutingKernel's `expert_id < 0` leave -1 out; blockExpertPrefixSumKernel looks for one place of an
    # expert in a row
    Runner("flashinfer_cutlass", DROPPED),
    # moe_runner/flashinfer_trtllm.py, `use_routed_topk`, which may step by runner_config.top_k
    _TRTLLM("flashinfer_trtllm_routed", methods=_TRTLLM_METHODS),
    # The same file, `materialized_topk` and `format_is_standard`: with ids the runner is flashinfer_trtllm_routed
    _TRTLLM("flashinfer_trtllm", since="0.5.23", methods=(*_TRTLLM_METHODS, "CompressedTensorsW4A4Nvfp4MoE")),
    # The same file, _fused_experts_flashinfer_mxfp4_sm100_trtllm_gen, routing method 1;
    # include/flashinfer/trtllm/fused_moe/: RoutingKernelTopK.cuh ranks by logit, then by number; SoftmaxPostprocess of
    # RoutingCustomPolicy.cuh follows
    _MXFP4(convention=MASKED, takes_kmax=False, marks={"_fi_kernel": "trtllm_sm100"}),
    # moe_runner/flashinfer_cutlass.py, _fused_experts_flashinfer_mxfp4_cutlass, and as flashinfer_cutlass
    _MXFP4(convention=DROPPED, marks={"_fi_kernel": "cutlass_sm90"}),
    _MXFP4(convention=DROPPED, marks={"_fi_kernel": "cutlass_sm120"}),
)
REASONS = {
    "aiter": "an empty slot holds -1 or may repeat an expert, but moe_sorting reads -1, and keeps one of two slots "
    "with the same expert, whatever its weight (aiter's csrc/include/moe_sorting_opus.h)",
    "flashinfer_cutedsl": "the kernels' treatment of an empty slot is unknown",
}
"""Reasons against other runners, if a reason besides `_UNKNOWN` is known."""
_UNKNOWN = "the kernel is not known to skip an empty slot, or to take one expert twice"


def list_runners() -> tuple[str, ...]:
    """Return the names that --moe-runner-backend may have with a policy on the release that runs."""
    return tuple(dict.fromkeys(runner.name for runner in TABLE if is_release(runner.since)))


def explain(name: str) -> str:
    """Return why `list_runners` lacks a name."""
    since = next((runner.since for runner in TABLE if runner.name == name), None)
    return f"the runner is served from SGLang {since} on" if since else REASONS.get(name, _UNKNOWN)


def find_kernel(layer: Any) -> Runner:
    """Return the row of the table for an upstream `FusedMoE`. Raises ValueError for a kernel without a row."""
    name = find_runner(layer)
    for runner in TABLE:
        if runner.name == name and is_release(runner.since) and runner.runs(layer):
            return runner
    method = type(getattr(layer, "scheme", None) or layer.quant_method).__name__
    found = f"MoE runner {name} of {method}" if name else f"a kernel of {method}"
    reason = REASONS.get(name or "", _UNKNOWN)
    raise ValueError(
        f"{found}: {reason}; use --moe-runner-backend {', '.join(list_runners())} if this quantization has one of them"
    )


def check_kernel(runner: Runner, layer: Any, config: Any) -> None:
    """Raise ValueError if the resolved `config` or an upstream `FusedMoE` is an exception to the table."""
    name, reason = runner.name, ""
    if name == "deep_gemm" and config.ep_size > 1 and not keeps_dropped():
        reason = (
            "with expert parallelism: before 0.5.23 SGLang looks the -1 of an empty slot up in a table of local "
            "experts and finds the last one; use --ep-size 1"
        )
    elif name == "flashinfer_cutlass" and gathers_routed():
        instead = "--disable-flashinfer-cutlass-moe-fp4-allgather"
        reason = f"gathers the ranks' rows after each rank has routed its own; use {instead}"
    elif name == "flashinfer_trtllm" and layer.num_fused_shared_experts:
        reason = "with a fused shared expert; use --disable-shared-experts-fusion"
    elif name == "flashinfer_trtllm" and leaves_sums(layer, config):
        reason = (
            "leaves a row's sum over experts to the next collective, as only a runner that routes itself may; "
            "use --moe-runner-backend triton"
        )
    if reason:
        raise ValueError(f"MoE runner {name} {reason}")
