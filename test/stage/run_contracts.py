"""Run in a process of its own, on one patched release: a layer under policy, through upstream's `select_experts`, and a
runner of each convention that checks what it is handed. Prints one JSON line a case.

Post-processing is that of a CUDA server, or of one on AMD: only their kernels are missing here, and these cases reach
none.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe import topk
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_xshare import Batch, build_plan, hooks, select
from sglang_xshare.stage.layer import DROPPED, FILLED, MASKED, Convention, Layer
from sglang_xshare.stage.step import Step
from stage.compare_routing import make_config
from stage.contracts import check, run_experts, run_native
from stage.fake import put_in_step

ROWS, EXPERTS, TOP_K, HIDDEN, WIDTH = 9, 16, 4, 12, 8
REPLICAS = 8  # the first experts have two places
PLANS: dict[str, dict[str, Any]] = {
    "vanilla": {"policy": "vanilla"},
    "xshare": {"policy": "xshare", "k0": 1, "add": 2},
    "short rows": {"policy": "dynamic-skip", "beta": 0.7},
    "truncating": {"policy": "moe-spec", "budget": 3, "coverage": "truncate"},
    "kmax": {"policy": "oea", "k0": 2, "kmax": 6},
}
# Live rows, and whether logits tie.
BATCHES = ((ROWS, False), (ROWS, True), (5, False), (1, True))
GROUPED = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
SHARED = {"scoring_func": "sigmoid", "correction_bias": torch.linspace(-0.3, 0.3, EXPERTS), **GROUPED}


@dataclass(frozen=True)
class Case:
    """`places`: how upstream maps an expert, None, "static", "dynamic"; `shared`: fused; `amd`: 0 in padding rows."""

    convention: Convention
    plan: str
    live: int
    tied: bool
    shared: int = 0
    places: str | None = None
    amd: bool = False


def list_cases() -> Iterator[Case]:
    for convention, plan, (live, tied) in itertools.product((FILLED, DROPPED), PLANS, BATCHES):
        for shared, places in ((0, None), (1, None), (0, "static"), (0, "dynamic")):
            yield Case(convention, plan, live, tied, shared, places)
    for plan, batch in itertools.product(("vanilla", "xshare"), BATCHES):
        yield Case(MASKED, plan, *batch)
    for plan, batch in itertools.product(PLANS, BATCHES):
        live, tied = batch
        yield Case(FILLED, plan, live, tied, amd=True)


def make_places(algorithm: str | None) -> tuple[ExpertLocationDispatchInfo | None, torch.Tensor]:
    """(upstream's table of places, the expert in each)."""
    if algorithm is None:
        return None, torch.arange(EXPERTS + 1)
    owner = torch.cat([torch.arange(EXPERTS), torch.arange(REPLICAS)])
    owner = owner[torch.randperm(len(owner), generator=torch.Generator().manual_seed(1))]
    found = [(owner == expert).nonzero().flatten().tolist() for expert in range(EXPERTS)]
    info = ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=torch.tensor([places[-1] for places in found]),
        partial_logical_to_all_physical_map=torch.tensor([(places * 2)[:2] for places in found]),
        partial_logical_to_all_physical_map_num_valid=torch.tensor([len(places) for places in found]),
        num_physical_experts=len(owner),
        rank_invariant=True,
    )
    return info, owner


def run(case: Case) -> dict[str, Any]:
    """The case's problems, the output's distance from upstream's own, and experts used beyond the active ones."""
    generator = torch.Generator().manual_seed(0)
    logits, hidden = (torch.randn(ROWS, size, generator=generator) for size in (EXPERTS, HIDDEN))
    if case.tied:
        logits = logits.round()
    valid = torch.arange(ROWS) < case.live
    config = make_config(case.shared, renormalize=True, **(SHARED if case.shared else {"scoring_func": "softmax"}))
    masked = case.convention == MASKED
    numbered: dict[str, Any] = {"convention": case.convention, "renumbers": case.places is not None or case.amd}
    layer = Layer(3, config, None, **numbered, runner_ranks_logits=masked, recorded=not masked)
    plan = build_plan(PLANS[case.plan])
    put_in_step(layer, plan, Step("decode", ROWS, Batch(valid)))
    info, owner = make_places(case.places)
    chosen = select(logits, plan, layer.router, Batch(valid), backend="reference")

    told: list[tuple[int, torch.Tensor]] = []
    capturer = SimpleNamespace(capture=lambda layer_id, topk_indices: told.append((layer_id, topk_indices)))
    topk.get_global_experts_capturer = lambda: capturer
    hooks._stage = SimpleNamespace()  # type: ignore[assignment]
    if masked:
        _, seen = hooks.prepare(layer.plain_config, topk.TopKOutputFormat.BYPASSED, logits)
        values, ids = seen.float().topk(TOP_K)  # as FlashInfer's kernel: by logit, then softmax
        ids, weights = ids.int(), values.softmax(-1)
        chosen = select(logits.bfloat16(), plan, layer.router, Batch(valid), backend="reference")
    else:
        topk._is_cuda, topk._is_hip = not case.amd, case.amd
        live = torch.tensor(case.live) if case.amd else None
        given = {"num_token_non_padded": live, "expert_location_dispatch_info": info}
        out = topk.select_experts(hidden, logits, layer.plain_config, layer_id=0, **given)
        topk._is_cuda = topk._is_hip = False
        ids, weights = out.topk_ids, out.topk_weights
    hooks._stage = None

    places = EXPERTS + case.shared if info is None else len(owner)
    problems = check(ids, weights, places, case.convention)
    columns = chosen.topk_ids.shape[1]
    if not masked and not ([one[0] for one in told] == [3] and torch.equal(told[0][1][:, :columns], chosen.topk_ids)):
        problems.append("what is returned as routed experts is what was chosen")
    if case.plan == "vanilla" and not (masked or case.tied):
        own = topk.select_experts(hidden, logits, config, layer_id=0)
        expected = run_native(hidden, own.topk_ids.int(), own.topk_weights, W1, W2)
    else:
        expected = run_native(hidden, chosen.topk_ids, chosen.topk_weights, W1, W2)
        if case.shared:
            share = layer.with_shared.shared_weight
            slots = torch.full((ROWS, 1), EXPERTS, dtype=torch.int32)
            expected += run_native(hidden, slots, torch.full((ROWS, 1), share), W1, W2)
    error = (run_experts(hidden, ids, weights, W1[owner], W2[owner]) - expected)[valid].abs().max()
    # Where its runner ranks logits, a padding row has weights as well.
    used = chosen.active.sum().clamp(min=TOP_K) if masked else len(ids[weights > 0].unique())
    return {"problems": problems, "error": float(error), "used": len(ids[ids >= 0].unique()) - int(used)}


if __name__ == "__main__":
    set_global_server_args_for_scheduler(ServerArgs(model_path="none"))  # the native loop's activation asks it
    W1, W2 = (
        torch.randn(EXPERTS + 1, *shape, generator=torch.Generator().manual_seed(2))
        for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    for case in list_cases():
        print(json.dumps({"case": str(case), **run(case)}), flush=True)
