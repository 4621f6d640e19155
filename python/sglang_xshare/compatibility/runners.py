"""A table of the MoE runners that support a policy.

A slot is a column of a row's expert ids and weights. A row with fewer experts than top-k has empty slots. MoE runners
need empty slots in different forms (see `Convention` in `stage.layer`).

The comments name the code that handles empty slots. They cite files of SGLang 0.5.23, with paths below `sglang/`.
Unless noted, 0.5.17 and 0.5.21 have the same code. Files in `csrc/` and `include/` belong to FlashInfer, in the
versions that these three releases require (0.6.15.post1, 0.6.18 and 0.7.2).
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
    """A kernel that SGLang may run for a value of --moe-runner-backend."""

    name: str
    convention: Convention
    since: str = "0.5.17"
    """The first SGLang release in which the kernel handles empty slots in this way."""
    takes_kmax: bool = True
    """False if the number of columns must be the model's top-k."""
    methods: tuple[str, ...] = ()
    """Classes of quantization methods or schemes that call this kernel. Empty if all of them call it."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the quantization method whose values identify the kernel. A method may also lack the attribute."""

    def runs(self, layer: Any) -> bool:
        """Return whether a `FusedMoE` layer uses this kernel. The layer's MoE runner must have the kernel's `name`."""
        method: Any = getattr(layer, "quant_method", None)
        kinds = {kind.__name__ for owner in (method, getattr(layer, "scheme", None)) for kind in type(owner).__mro__}
        marked = all(getattr(method, name, value) == value for name, value in self.marks.items())
        return marked and (not self.methods or not kinds.isdisjoint(self.methods))


# The sources are `expertIdx > -1` in csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_custom.cuh and
# `isLocalExpert` in include/flashinfer/trtllm/fused_moe/RoutingKernel.cuh. An id of -1 gets the permuted index -1,
# which finalizeKernel skips. If a row contains an expert twice, two threads race to write. `marks` excludes
# Fp8MoEMethod with one scale for a whole tensor.
_TRTLLM_METHODS = ("UnquantizedFusedMoEMethod", "Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod")
_TRTLLM = partial(Runner, convention=DROPPED, takes_kmax=False, marks={"block_quant": True})
_MXFP4 = partial(Runner, "flashinfer_mxfp4", since="0.5.23", methods=("Mxfp4MoEMethod",))
# moe_align_block_size sorts each slot separately, so a row may contain an expert twice. It uses an id of -1 as an index
# unless it filters experts. Layers without `FusedMoE`, as in the first DeepSeek model, also use this row of the table.
TRITON = Runner("triton", FILLED)
TABLE = (
    TRITON,
    Runner("marlin", FILLED),  # fused_marlin_moe also sorts with moe_align_block_size
    # prepare_moe_input in cutlass_moe.py counts and places each slot separately, and uses -1 as an index.
    Runner("cutlass", FILLED),
    # moe/topk.py calls `routing(router_logits, ...)` of triton_kernels, which computes top-k, then softmax. A bit mask
    # contains the experts of a row.
    Runner("triton_kernel", MASKED, takes_kmax=False),
    # kernels/ops/moe/ep_moe_kernels.py skips -1: `valid` in fused_moe_dispatch_index and ep_scatter, and `dst_idx >= 0`
    # in fill_gateup_input and post_reorder_deepgemm (0.5.17 has `expert_id >= 0` in all four). post_reorder_deepgemm
    # uses runner_config.top_k as the number of columns. An expert has room for m_max rows. This is enough if each row
    # of the batch contains the expert only once.
    Runner("deep_gemm", DROPPED, takes_kmax=False),
    # csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh skips -1: `expert_id == target_expert_id`,
    # `is_valid_expert`, and `expert_id < 0` in finalizeMoeRoutingKernel. blockExpertPrefixSumKernel finds an expert
    # only once in a row.
    Runner("flashinfer_cutlass", DROPPED),
    # The code for `use_routed_topk` in moe_runner/flashinfer_trtllm.py may use runner_config.top_k as the number of
    # columns.
    _TRTLLM("flashinfer_trtllm_routed", methods=_TRTLLM_METHODS),
    # If this runner receives expert ids, it works like flashinfer_trtllm_routed. The sources are `materialized_topk`
    # and `format_is_standard` in the same file.
    _TRTLLM("flashinfer_trtllm", since="0.5.23", methods=(*_TRTLLM_METHODS, "CompressedTensorsW4A4Nvfp4MoE")),
    # _fused_experts_flashinfer_mxfp4_sm100_trtllm_gen in the same file uses routing method 1. The kernels are in
    # include/flashinfer/trtllm/fused_moe/. RoutingKernelTopK.cuh ranks experts by logit, then by number. Then
    # SoftmaxPostprocess in RoutingCustomPolicy.cuh computes the weights.
    _MXFP4(convention=MASKED, takes_kmax=False, marks={"_fi_kernel": "trtllm_sm100"}),
    # _fused_experts_flashinfer_mxfp4_cutlass in moe_runner/flashinfer_cutlass.py calls the kernels of
    # flashinfer_cutlass.
    _MXFP4(convention=DROPPED, marks={"_fi_kernel": "cutlass_sm90"}),
    _MXFP4(convention=DROPPED, marks={"_fi_kernel": "cutlass_sm120"}),
)
REASONS = {
    "aiter": "an empty slot holds -1 or may repeat an expert, but moe_sorting reads -1, and keeps one of two slots "
    "with the same expert, whatever its weight (aiter's csrc/include/moe_sorting_opus.h)",
    "flashinfer_cutedsl": "the kernels' treatment of an empty slot is unknown",
}
"""The reasons why these MoE runners do not support a policy. For all other runners the reason is `_UNKNOWN`."""
_UNKNOWN = "the kernel is not known to skip an empty slot, or to take one expert twice"


def list_runners() -> tuple[str, ...]:
    """Return the values of --moe-runner-backend that support a policy on the installed release of SGLang."""
    return tuple(dict.fromkeys(runner.name for runner in TABLE if is_release(runner.since)))


def explain(name: str) -> str:
    """Return the reason why an MoE runner is not in `list_runners`."""
    since = next((runner.since for runner in TABLE if runner.name == name), None)
    return f"the runner is served from SGLang {since} on" if since else REASONS.get(name, _UNKNOWN)


def find_kernel(layer: Any) -> Runner:
    """Return the row of `TABLE` for a `FusedMoE` layer. Raises ValueError if no row describes the layer's kernel."""
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
    """Raise ValueError if a kernel in `TABLE` does not support a policy with this layer and these arguments."""
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
