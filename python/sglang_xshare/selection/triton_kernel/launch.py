"""From `select()` to the kernel: allocate the answer and launch, once or, where no barrier can hold, twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import torch
import triton

from ...policies import bounds
from ...policies.plan import SelectionPlan
from ...types import Alignment, Batch, Router, RunnerSlots, Selection, Tally
from .budgets import Budgets, find_budgets
from .kernel import COLLECT, MEASURE, RESCUE, ROUTE, select_kernel
from .mask import allocate_masked, launch_mask
from .recipe import OPTIONS, make_recipe, supports
from .slots import finish_slots
from .tile import MAX_SORTED, count_blocks, count_programs, make_tile

INTERPRETED = triton.knobs.runtime.interpret
TWO_LAUNCHES = "SGLANG_XSHARE_TWO_LAUNCHES"
"""Set to 1, this environment variable rules out cooperative launches, whose programs wait for each other."""
EARLY_LAUNCH = "SGLANG_XSHARE_EARLY_LAUNCH"
"""Set to 1, this one has the kernel launched while the one before it still runs (programmatic dependent launch, from
Hopper on). It then waits for that one's end before it touches memory. Off: no GPU has timed it.
"""
COUNTERS = 64
CACHE_LINE = 32  # int32

_counters: dict[torch.device, torch.Tensor] = {}
_launches = count()


def select(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
    slots: RunnerSlots | None,
    budgets: Budgets | None = None,
    tally: Tally | None = None,
) -> Selection:
    """Route rows [n, N] by `plan`; see `sglang_xshare.selection.select`.

    `budgets`, made for the plan, may hold other numbers than it by the time the kernel runs, or a graph replays.

    On CUDA, or under TRITON_INTERPRET=1 on any device. A CUDA graph can capture it: nothing waits for the host, and
    `batch`'s tensors are read when the graph replays. Raises ValueError where `supports` is False.
    """
    num_rows, num_experts = logits.shape
    if not supports(plan, router, batch, num_rows, num_experts):
        raise ValueError(
            f"plan = {plan} for {num_rows} x {num_experts} logits: allowed with backend triton is what it supports"
        )
    if not (logits.is_cuda or INTERPRETED):
        raise ValueError(
            f"router_logits on {logits.device}: allowed with backend triton is cuda, or TRITON_INTERPRET=1"
        )
    exact = batch.exact is not None
    answer = _allocate(logits, plan.columns(router, exact) + (slots.shared if slots else 0), tally)
    if slots is not None and slots.masked:
        answer = replace(answer, masked_logits=allocate_masked(logits))
    if num_rows:
        if slots is not None and slots.block_size is not None and answer.topk_ids.numel() <= MAX_SORTED:
            active = num_experts  # as numbers that change may have it, or all that are resident
            if budgets is None and (batch.resident is None or batch.slots is not None or not plan.takes_residents):
                exact_rows, slot_count = num_rows if exact else 0, None if batch.resident is None else batch.slots
                active = bounds.max_active(
                    plan, router, num_experts, num_rows, batch.tokens_per_request, exact_rows, slot_count
                )
            blocks = count_blocks(answer.topk_ids.numel(), active, slots.block_size)
            answer = replace(answer, alignment=_allocate_alignment(logits, blocks, slots.block_size))
        budgets = budgets or find_budgets(plan, logits.device)
        _launch(logits, plan, router, batch, rank_of_expert, answer, budgets, slots)
    return answer


def _allocate(logits: torch.Tensor, columns: int, tally: Tally | None) -> Selection:
    num_rows, num_experts = logits.shape
    # The kernel writes every element, if there is a row to run it for.
    new = logits.new_empty if num_rows else logits.new_zeros
    if tally is None or not num_rows:
        tally = Tally(
            active=new((num_experts,), dtype=torch.bool),
            vanilla_active=new((num_experts,), dtype=torch.bool),
            kept_mass=new((num_rows,), dtype=torch.float32),
            rescued=new((), dtype=torch.int64),
        )
    return Selection(
        topk_ids=new((num_rows, columns), dtype=torch.int32),
        topk_weights=new((num_rows, columns), dtype=torch.float32),
        selected=new((num_experts,), dtype=torch.bool),
        active=tally.active,
        rescued=tally.rescued,
        vanilla_active=tally.vanilla_active,
        kept_mass=tally.kept_mass,
    )


def _allocate_alignment(logits: torch.Tensor, blocks: int, block_size: int) -> Alignment:
    new = partial(logits.new_empty, dtype=torch.int32)
    return Alignment(new(blocks * block_size), new(blocks), new(1), block_size)


def _launch(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
    answer: Selection,
    budgets: Budgets,
    slots: RunnerSlots | None,
) -> None:
    aligned: tuple[torch.Tensor | None, ...] = (None, None, None)
    blocks = block_size = 0
    if answer.alignment is not None:
        aligned = (answer.alignment.sorted_slots, answer.alignment.block_experts, answer.alignment.num_sorted)
        blocks, block_size = len(answer.alignment.block_experts), answer.alignment.block_size
    num_rows, num_experts = logits.shape
    recipe = make_recipe(plan, router, batch, logits, slots, block_size)
    tile = make_tile(plan, router, batch, num_rows, num_experts, block_size, recipe.shared)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    partials = confidences = arrivals = None
    if recipe.follows_voters:
        confidences = logits.new_empty((num_rows,), dtype=torch.int64)
    programs = count_programs(tile, plan, batch, num_rows)
    if programs > 1:
        planes = 3 if recipe.follows_voters or recipe.rescue or recipe.sets_aside else 1
        partials = logits.new_empty((planes, programs, tile.experts), dtype=torch.int64)
        arrivals = _find_counter(logits.device, programs)
    together = programs == 1 or arrivals is not None
    arguments = (
        logits,
        None if batch.valid is None else batch.valid.contiguous(),
        None if batch.exact is None else batch.exact.contiguous(),
        batch.resident.contiguous() if recipe.residents and batch.resident is not None else None,
        None if router.correction_bias is None else router.correction_bias.contiguous(),
        None if router.expert_scale is None else router.expert_scale.contiguous(),
        rank_of_expert.contiguous() if plan.target_per_rank and rank_of_expert is not None else None,
        budgets.values,
        partials,
        confidences,
        arrivals,
        answer.topk_ids,
        answer.topk_weights,
        answer.masked_logits if together else None,
        answer.selected,
        answer.active,
        answer.vanilla_active,
        answer.kept_mass,
        answer.rescued,
        *aligned,
        num_rows,
        logits.stride(0),
        blocks,
        batch.slots if recipe.bounded else None,
    )
    early = not INTERPRETED and os.environ.get(EARLY_LAUNCH) == "1"
    launch = partial(
        select_kernel[(programs,)],
        *arguments,
        recipe=recipe,
        tile=tile,
        early=early,
        **({"launch_pdl": True} if early else {}),
        num_warps=tile.warps,
        **OPTIONS,
    )
    if programs == 1:
        launch(begins=MEASURE.value, ends=ROUTE.value)
    elif together:
        _launch_cooperatively(launch, programs)
    else:
        for phase in [MEASURE] * recipe.follows_voters + [COLLECT] + [RESCUE] * recipe.rescue + [ROUTE]:
            launch(begins=phase.value, ends=phase.value)
    if answer.masked_logits is not None and not together:
        launch_mask(logits, answer, router.top_k, answer.masked_logits, answer.active)
    if recipe.fill and not together:
        tables = answer.selected, answer.active, answer.vanilla_active
        finish_slots[(1,)](
            answer.topk_ids,
            *tables,
            *aligned,
            num_rows,
            blocks,
            recipe=recipe,
            tile=tile,
            num_warps=tile.warps,
            **OPTIONS,
        )


def _launch_cooperatively(launch: Callable[..., object], programs: int) -> None:
    try:
        launch(begins=MEASURE.value, ends=ROUTE.value, launch_cooperative_grid=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"expert selection: a cooperative launch of {programs} programs failed ({error}); {TWO_LAUNCHES}=1 in the "
            "environment does without, in two launches a layer or more"
        ) from error


def _find_counter(device: torch.device, programs: int) -> torch.Tensor | None:
    """[2 or more] int32, 0 at first, for the barriers of one launch; None where it cannot have one.

    Launches that overlap, on several streams, take different counters. A CUDA graph keeps those of its capture: graphs
    must replay one after another, as SGLang's do.
    """
    if device.type != "cuda" or os.environ.get(TWO_LAUNCHES) == "1":
        return None
    if programs > torch.cuda.get_device_properties(device).multi_processor_count:
        return None
    if device not in _counters:
        if torch.cuda.is_current_stream_capturing():
            return None  # the zeros would be there only once the graph has run
        _counters[device] = torch.zeros((COUNTERS, CACHE_LINE), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # once: other streams will use them
    return _counters[device][next(_launches) % COUNTERS]
