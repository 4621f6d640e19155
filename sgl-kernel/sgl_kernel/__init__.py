"""The module `sgl_kernel` in plain torch, for machines that cannot load its CUDA build.

SGLang imports these names and calls `torch.ops.sgl_kernel.*` if SGLANG_USE_CPU_ENGINE=1. See README.md.
"""

from sgl_kernel import ops  # noqa: F401  registers torch.ops.sgl_kernel
from sgl_kernel.kv_cache import copy_all_layer_kv_cache_cpu
from sgl_kernel.kv_locations import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu
from sgl_kernel.verify import (
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
