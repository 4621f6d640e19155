"""A SGLang plugin that counts experts where the MoE runner receives its ids, independently of the stage.

It appends a JSON line a call to $EXPERT_PROBE: the forward's mode and requests, the layer, its rows; how many different
experts the ids hold (on this rank), how many the router's own top-k would have, the kept mass summed over rows; in
decode and verification the router logits and the active experts; and whether the stage's code is loaded at all. Under
data-parallel attention, also the rows of every rank, its own and those it was padded to, and whether some rank
prefills; where experts are paged, those loaded before and how many are copied.
With $EXPERT_PROBE_BYPASS it makes that layer route without `select_experts`, as some upstream paths do.
"""

import base64
import json
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from served.all_to_all import lend_all_to_all
from served.layers import lend_layers_with_states, lend_squared_relu


def install() -> None:
    """Called by upstream's `load_plugins()` in every process; only the scheduler's runs a model."""
    if multiprocessing.parent_process() is None or "EXPERT_PROBE" not in os.environ:
        return
    from sglang.srt.layers.moe import fused_moe_native, topk
    from sglang.srt.model_executor.model_runner import ModelRunner

    lend_cpu_backend()
    if "SGLANG_MAMBA_CONV_DTYPE" in os.environ:  # what families whose layers have states set
        lend_layers_with_states()
        lend_squared_relu()
    lend_all_to_all()
    file = Path(os.environ["EXPERT_PROBE"])
    forward, run_experts, select_experts = ModelRunner.forward, fused_moe_native.moe_forward_native, topk.select_experts
    mode, requests, rows_by_rank = "none", 0, None
    batch: Any = None

    def note_mode(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal mode, requests, batch, rows_by_rank
        requests, batch, rows_by_rank = forward_batch.batch_size, forward_batch, forward_batch.global_num_tokens_cpu
        mode = forward_batch.forward_mode.name + "_DRAFT" * self.is_draft_worker
        return forward(self, forward_batch, *args, **kwargs)

    def count(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        if not hasattr(layer.quant_method, "num_resident"):  # else its experts have other numbers here
            note(layer, topk_output)
        return run_experts(layer, x, topk_output, config)

    def note(layer: Any, topk_output: Any, **more: Any) -> None:
        weights, ids, logits = topk_output
        here = ids >= 0  # other ranks' experts are -1
        assert layer.moe_ep_size > 1 or here.all()
        expert_ids = ids.long() + layer.moe_ep_rank * layer.num_local_experts
        record = {"mode": mode, "layer": layer.layer_id, "rank": layer.moe_ep_rank + layer.moe_tp_rank}
        record |= {"pid": os.getpid(), "requests": requests, "stage": "sglang_xshare.stage.stage" in sys.modules}
        record |= describe(weights, expert_ids, logits.float(), here)
        if rows_by_rank is not None:
            padded = batch.global_num_tokens_cpu  # by now: the forward has padded them
            record |= {"own": rows_by_rank, "padded": padded, "prefills": batch.is_extend_in_batch}
        if mode in ("DECODE", "TARGET_VERIFY", "IDLE"):
            record |= {"logits": encode(logits), "active": expert_ids[here].unique().tolist()}
        with file.open("ab", buffering=0) as out:  # one write a line: several ranks share the file
            out.write(json.dumps(record | more).encode() + b"\n")

    def bypass(hidden_states: Any, router_logits: torch.Tensor, topk_config: Any, **kwargs: Any) -> Any:
        if kwargs["layer_id"] == int(os.environ["EXPERT_PROBE_BYPASS"]):
            weights, ids = router_logits.float().softmax(-1).topk(topk_config.top_k)
            return topk.StandardTopKOutput(weights / weights.sum(-1, keepdim=True), ids.int(), router_logits)
        return select_experts(hidden_states, router_logits, topk_config, **kwargs)

    with suppress(ImportError):  # before 0.5.23
        count_page_ins(note)
    ModelRunner.forward = note_mode
    fused_moe_native.moe_forward_native = count
    if "EXPERT_PROBE_BYPASS" in os.environ:
        topk.select_experts = bypass


def count_page_ins(note: Any) -> None:
    """Of a layer whose experts are paged: those that are loaded before it runs, and how many are copied then."""
    from sglang.srt.layers.moe.paged_experts.executor import EagerExecutor
    from sglang.srt.layers.moe.paged_experts.store import HostExpertStore

    run, page_in = EagerExecutor.run, HostExpertStore.page_in
    copied = 0

    def count_copied(self: Any, layer: Any, loads: Any) -> None:
        nonlocal copied
        copied += len(loads)
        page_in(self, layer, loads)

    def run_noted(self: Any, layer: Any, dispatch_output: Any) -> Any:
        resident, before = list(self.policy.resident), copied
        output = run(self, layer, dispatch_output)
        note(layer, dispatch_output.topk_output, resident=resident, page_ins=copied - before)
        return output

    EagerExecutor.run, HostExpertStore.page_in = run_noted, count_copied


def lend_cpu_backend() -> None:
    """Let CPU servers run data-parallel attention: what upstream's backends for GPUs have, and those for CPU lack.

    The length that stands for a padding request; a draft's plan for the padding requests too; and, before 0.5.21, the
    copy of a rank's rows to its place among all, two collectives, and memory that need not be pinned.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

    decode = IntelAMXAttnBackend.forward_decode

    def decode_padded(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        planned = getattr(self, "draft_decode_metadata", None)
        if planned is not None and len(planned[1]) < len(query):
            table, lengths, requests = planned
            padding = 0, len(query) - len(lengths)
            self.draft_decode_metadata = table, pad(lengths, padding, value=1), pad(requests, padding)
        return decode(self, query, *args, **kwargs)

    IntelAMXAttnBackend.forward_decode = decode_padded
    AttentionBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    AttentionBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    if not hasattr(dp_attention, "memcpy_cpu"):
        dp_attention.memcpy_triton, make = copy_rows, torch.tensor
        torch.tensor = lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
        GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
        GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor


def copy_rows(to: torch.Tensor, of: torch.Tensor, dim: int, offset: Any, size: Any, offset_of: bool) -> None:
    """What upstream's Triton kernel does."""
    there = slice(int(offset), int(offset + size))
    if offset_of:
        to[: int(size)] = of[there]
    else:
        to[there] = of[: int(size)]


def describe(weights, ids, logits, here, top_k=8):
    """Counts of one call on a model with a softmax router; ties go to the lower index. `here`: slots of this rank's."""
    scores = logits.softmax(-1)
    own = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids.where(here, 0)).where(here & (weights > 0), 0)
    return {
        "rows": len(ids),
        "before": len(own.unique()),
        "after": len(ids[here].unique()),
        "kept": float((chosen.sum(1) / scores.gather(1, own).sum(1)).sum()),
    }


def encode(logits: torch.Tensor) -> str:
    """Router logits as text."""
    return base64.b64encode(logits.float().contiguous().numpy().tobytes()).decode()


def read_logits(call: dict[str, Any]) -> torch.Tensor:
    """The router logits [rows, experts] of a recorded decode or verify call."""
    return torch.frombuffer(bytearray(base64.b64decode(call["logits"])), dtype=torch.float32).view(call["rows"], -1)
