"""Run in a process of its own, on one patched release: every case of `stage.ranks`, one process a rank, joined by gloo
in upstream's groups, with upstream's `TopK`, and a dispatcher that drops -1. What a rank did in a case goes to a file.
"""

import multiprocessing
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from served.all_to_all import gather
from sglang_xshare import hooks
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.forward import wrap_model, wrap_router, wrap_runner
from sglang_xshare.stage.gather import Ranks
from sglang_xshare.stage.layer import DROPPED
from sglang_xshare.stage.reports import Reports
from sglang_xshare.upstream.batches import Batches
from sglang_xshare.upstream.ranks import find_rank
from stage.fake import bind, make_stage
from stage.ranks import CASES, EXPERTS, LAYERS, TOP_K, Case, Load, Model, run_experts

SECONDS = 60
"""Ranks that wait for each other for so long wait forever."""


def run_rank(cases: list[Case], rank: int, folder: Path) -> None:
    """All cases of ranks of one kind, on one of these ranks."""
    torch.set_num_threads(1)
    size, share = cases[0].size, cases[0].share
    init_distributed_environment(size, rank, f"file://{folder}/{size}-{share}", backend="gloo", timeout=SECONDS)
    widths = {"tp_size": size, "attn_dp_size": size // share, "attn_tp_size": share, "moe_ep_size": size}
    ranks = {"tp_rank": rank, "attn_dp_rank": rank // share, "attn_tp_rank": rank % share, "moe_ep_rank": rank}
    with get_parallel().override(**widths, **ranks):
        initialize_model_parallel(backend="gloo")
        for case in cases:
            torch.save(serve(case, rank), folder / f"{case.name}-{rank}.pt")


def serve(case: Case, rank: int) -> dict[str, Any]:
    """What a rank does with all loads of a case, and what it has counted."""
    group, size = get_parallel().tp_group.device_group, case.size
    held = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)

    def route(number: int, hidden: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = routers[number]
        routed = router.forward_native(hidden, logits) if len(hidden) else router.empty_topk_output(hidden.device)
        return routed.topk_weights, routed.topk_ids

    def dispatch(number: int, hidden: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        rows = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        torch.distributed.all_gather(rows, torch.tensor([len(hidden)]), group=group)
        counts = [int(count) for count in rows]
        weights, ids = routed
        rows_of_all, weights, ids = (gather(part, counts, group) for part in (hidden, weights.float(), ids.long()))
        out = run_experts(number, rows_of_all, weights, ids, held)
        torch.distributed.all_reduce(out, group=group)
        return out.narrow(0, sum(counts[:rank]), len(hidden))

    routers = [TopK(TOP_K, layer_id=number) for number in range(LAYERS)]
    model = Model(route, dispatch)
    schedule = build_schedule(case.policy, case.keys, any(load.mode == "verify" for load in case.loads))
    assert schedule is not None
    layers = bind(SimpleNamespace(configs=[router.topk_config for router in routers]), convention=DROPPED)
    for router, layer in zip(routers, layers, strict=True):
        router.topk_config = layer.plain_config
    ranks = Ranks(*find_rank(), EXPERTS, schedule.rows == "batch")
    installed = hooks._stage = make_stage(layers, schedule, Batches(always_pad=True), ranks=ranks)
    wrap_model(model, installed)
    for router in routers:
        wrap_router(router, installed)
    model_runner = SimpleNamespace(forward=lambda batch, hidden: model.forward(hidden, None, batch))
    wrap_runner(model_runner, Reports(installed))
    counted: dict[str, Any] = {"steps": [forward(model_runner, load, rank, case.share) for load in case.loads]}
    counted |= {"totals": installed.acting.counters.totals, "outcomes": dict(installed.acting.counters.outcomes)}
    if installed.in_force.lanes:
        counted["observed"] = [lane.counters.totals for lane in installed.in_force.lanes]
    return counted


def forward(model_runner: Any, load: Load, rank: int, share: int) -> Any:
    """A rank's forward of its share of a load."""
    attention, part = divmod(rank, share)
    rows = load.rows(share)
    hidden = load.hidden(share).split(rows)[attention].tensor_split(share)[part]
    return model_runner.forward(load.batches(share)[attention], hidden)


def main(folder: Path) -> None:
    """Every case, one after another; ends with status 1 where a rank fails."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="none", device="cpu"))
    processes = multiprocessing.get_context("fork")  # which have all this imported already
    kinds = groupby(sorted(CASES, key=find_kind), find_kind)
    for (size, share), cases in [(kind, list(cases)) for kind, cases in kinds]:
        ranks = [processes.Process(target=run_rank, args=(cases, rank, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(4 * SECONDS)
        codes = [process.exitcode for process in ranks]
        if codes != [0] * size:
            for process in ranks:
                process.kill()
            sys.exit(f"{size} ranks, {share} of which share requests: ended with {codes}")


def find_kind(case: Case) -> tuple[int, int]:
    """What cases have in common that the same ranks can serve."""
    return case.size, case.share


if __name__ == "__main__":
    main(Path(sys.argv[1]))
