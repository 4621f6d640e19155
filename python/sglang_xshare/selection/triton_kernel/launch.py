"""The host side of the kernel. It allocates the answer and launches the kernel once, or once for each phase."""

from dataclasses import replace
from functools import partial
from itertools import count

import torch
import triton

from ...policies.plan import SelectionPlan
from ...types import Alignment, Batch, Router, RunnerSlots, Selection, Tally, allocate_tally
from ..alignment import BLOCK
from ..scores import find_depth
from ..slots import serve_runner
from .alignment import HEAD, MOST_PAIRS, MOST_ROWS
from .budgets import Budgets, find_budgets
from .kernel import COLLECT, MEASURE, RESCUE, ROUTE, select_kernel
from .recipe import OPTIONS, Recipe, make_recipe, supports
from .tile import count_programs, make_tile

INTERPRETED = triton.knobs.runtime.interpret
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
    """Select the batch's experts and each row's experts; see `sglang_xshare.selection.select`.

    `budgets` must have been made for this plan. Its numbers may change before the kernel runs or a CUDA graph replays.

    The kernel runs on CUDA, and with TRITON_INTERPRET=1 on any device. A CUDA graph can capture the launch, because the
    host never waits. A replay reads the tensors of `batch` again. Raises ValueError if `supports` returns False.
    """
    num_rows, num_experts = logits.shape
    if not supports(plan, router, batch, num_rows, num_experts):
        raise ValueError(
            f"plan = {plan} for {num_rows} x {num_experts} logits: must be a plan that backend triton supports"
        )
    if not (logits.is_cuda or INTERPRETED):
        raise ValueError(
            f"router_logits on {logits.device}: must be on cuda with backend triton, unless TRITON_INTERPRET=1"
        )
    tile = make_tile(plan, router, batch, num_rows, num_experts, slots.shared if slots else 0)
    programs = count_programs(tile, plan, batch, num_rows)
    arrivals = _find_counter(logits.device, programs) if programs > 1 else None
    together = programs <= 1 or arrivals is not None
    # Without a barrier no program sees the experts that all rows use, so torch fills the slots.
    recipe = make_recipe(plan, router, batch, logits, slots if together else None)
    answer = _allocate(logits, recipe, tally)
    if together and slots is not None and slots.masked:
        masked = torch.empty_like(logits, memory_format=torch.contiguous_format)
        answer = replace(answer, masked_logits=masked)
    if not num_rows:
        return answer
    alignment = None
    # Every slot must contain an expert. An empty slot would need blocks of its own, before the blocks of the experts.
    if slots is not None and slots.aligned and recipe.fill and programs == 1 and tile.rows <= MOST_ROWS:
        pairs = answer.topk_ids.numel()
        if pairs <= MOST_PAIRS:
            alignment = logits.new_empty((HEAD.value + pairs * (BLOCK + 1),), dtype=torch.int32)
            answer = replace(answer, alignment=divide(alignment, pairs))
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    partials = confidences = None
    if recipe.follows_voters:
        confidences = logits.new_empty((num_rows,), dtype=torch.int64)
    if programs > 1:
        planes = 3 if recipe.follows_voters or recipe.rescue or recipe.sets_aside else 1
        partials = logits.new_empty((planes, programs, tile.experts), dtype=torch.int64)
    arguments = (
        logits,
        None if batch.valid is None else batch.valid.contiguous(),
        None if batch.exact is None else batch.exact.contiguous(),
        batch.resident.contiguous() if recipe.residents and batch.resident is not None else None,
        find_depth(batch, num_rows, logits.device).contiguous() if recipe.weighs or recipe.warms_some else None,
        None if router.correction_bias is None else router.correction_bias.contiguous(),
        None if router.expert_scale is None else router.expert_scale.contiguous(),
        rank_of_expert.contiguous() if plan.target_per_rank and rank_of_expert is not None else None,
        (budgets or find_budgets(plan, logits.device)).values,
        partials,
        confidences,
        arrivals,
        answer.topk_ids,
        answer.topk_weights,
        answer.masked_logits,
        alignment,
        answer.selected,
        answer.active,
        answer.vanilla_active,
        answer.kept_mass,
        answer.rescued,
        num_rows,
        logits.stride(0),
        batch.slots if recipe.bounded else None,
    )
    launch = partial(select_kernel[(programs,)], *arguments, recipe=recipe, tile=tile, num_warps=tile.warps, **OPTIONS)
    if programs == 1:
        launch(begins=MEASURE.value, ends=ROUTE.value)
    elif together:
        launch(begins=MEASURE.value, ends=ROUTE.value, launch_cooperative_grid=True)
    else:
        for phase in [MEASURE] * recipe.follows_voters + [COLLECT] + [RESCUE] * recipe.rescue + [ROUTE]:
            launch(begins=phase.value, ends=phase.value)
    if together or slots is None:
        return answer
    answer = replace(answer, **serve_runner(answer, logits, router.top_k, slots))
    if tally is not None:
        tally.active.copy_(answer.active)  # `serve_runner` may activate more experts for masked logits
    return answer


def divide(buffer: torch.Tensor, pairs: int) -> Alignment:
    """Return the parts of the kernel's buffer as an `Alignment`.

    The buffer contains the total, room for one block for each pair, and the expert of each block.
    """
    head, blocks = HEAD.value, HEAD.value + pairs * BLOCK
    return Alignment(buffer[head:blocks], buffer[blocks:], buffer[:1])


def _allocate(logits: torch.Tensor, recipe: Recipe, tally: Tally | None) -> Selection:
    num_rows, num_experts = logits.shape
    columns = recipe.columns + recipe.shared
    # The kernel writes every element, but it is not launched if there are no rows.
    new = logits.new_empty if num_rows else logits.new_zeros
    if tally is None or not num_rows:
        tally = allocate_tally(new, num_rows, num_experts)
    return Selection(
        topk_ids=new((num_rows, columns), dtype=torch.int32),
        topk_weights=new((num_rows, columns), dtype=torch.float32),
        selected=new((num_experts,), dtype=torch.bool),
        active=tally.active,
        rescued=tally.rescued,
        vanilla_active=tally.vanilla_active,
        kept_mass=tally.kept_mass,
    )


def _find_counter(device: torch.device, programs: int) -> torch.Tensor | None:
    """Return the counter for the barriers of one launch, or None if the launch cannot have barriers.

    The counter is a tensor [CACHE_LINE] int32, which is 0 at first. Launches that overlap on several streams use
    different counters. A CUDA graph keeps the counters of its capture, so graphs must replay one after another, as in
    SGLang.
    """
    if device.type != "cuda" or programs > torch.cuda.get_device_properties(device).multi_processor_count:
        return None
    if device not in _counters:
        if torch.cuda.is_current_stream_capturing():
            return None  # the counters would become 0 only when the graph runs
        _counters[device] = torch.zeros((COUNTERS, CACHE_LINE), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # once, because other streams will use the counters
    return _counters[device][next(_launches) % COUNTERS]
