"""What the kernel is compiled for: a plan and a router in its terms, and how the batch is cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...plan import SelectionPlan
from ...types import Batch, Router

# By instruction counts on sm_90 (no timing has confirmed them), one multiprocessor handles so many scores in about the
# time that several take to exchange their words.
SINGLE_PROGRAM = 2048
MAX_PROGRAMS = 64
MIN_ROWS, WARPS = 8, 8
# What the registers of a program hold; balancing the ranks of 512 experts spills some (ptxas: 3.5 KB).
MAX_TILE = 16384
MAX_EXPERTS = 512
# 31 bits hold a column's sum of utilities up to 2^20, and a row's sum of shares up to 2^26.
MAX_ROWS, MAX_TOP_K = 2047, 31
# Slots that one program sorts; with more, upstream's own kernel is left to it.
MAX_SORTED = 1024


@dataclass(frozen=True)
class Recipe:
    """A plan for a router, with no defaults left and nothing but what the kernel uses: equal work compiles once."""

    num_experts: int
    top_k: int
    sigmoid: bool
    biased: bool
    renormalize: bool
    num_groups: int
    """1 where the router does not limit groups."""
    topk_group: int
    normalize: bool
    """Whether anything needs P itself rather than a multiple of it."""
    unique_keys: bool
    """Whether C is a 16-bit float, which leaves room for the expert's index in a 32-bit key."""
    k0: int
    p: float
    beta: float | None
    tokens_per_request: int
    """1 where the plan does not ask for requests."""
    add_per_request: int
    add: int
    mass: float | None
    target_per_rank: int | None
    fill_ranks: bool
    """Whether each rank is filled by itself, not all of them in turn."""
    budget: int | None
    drop: int | None
    by_votes: bool
    confidence: float | None
    max_voters: int
    min_votes: int
    utility_full: bool
    coverage: str
    reach: int | None
    """How far down its own ranking a row may substitute; None: to the end."""
    rescue: bool
    """Whether a row can be left without experts and get its first choice back."""
    columns: int
    scaling: float
    fill: bool
    """Whether no slot may stay empty."""
    block_size: int
    """Of the alignment; 0 where none is asked for."""


@dataclass(frozen=True)
class Tile:
    """How rows are spread over programs. All but `programs` are powers of two."""

    rows: int
    experts: int
    request: int
    columns: int
    programs: int
    partials: int
    narrow: bool
    """Whether a utility and an expert's index together fit 31 bits."""
    all_rows: int
    """The rows of all programs."""
    slots: int
    """And their slots."""
    positions: int
    """The alignment's length, at most."""


def make_recipe(
    plan: SelectionPlan, router: Router, batch: Batch, logits: torch.Tensor, fill: bool = False, block_size: int = 0
) -> Recipe:
    """The recipe for logits [n, N]; the plan has been checked against the router."""
    num_experts = logits.shape[1]
    biased = router.correction_bias is not None
    sigmoid = router.scoring == "sigmoid"
    by_votes = plan.ranks_experts and plan.ranking == "votes"
    utility_full = plan.utility == "full" or by_votes or plan.confidence is not None
    k0 = router.top_k if plan.k0 is None else plan.k0
    return Recipe(
        num_experts=num_experts,
        top_k=router.top_k,
        sigmoid=sigmoid,
        biased=biased,
        renormalize=router.renormalize,
        num_groups=_count_groups(router),
        topk_group=router.topk_group or 1,
        normalize=not sigmoid and (biased or utility_full or plan.p < 1 or not router.renormalize),
        unique_keys=logits.dtype.itemsize == 2 and not biased,
        k0=k0,
        p=plan.p,
        beta=plan.beta,
        tokens_per_request=batch.tokens_per_request if plan.add_per_request else 1,
        add_per_request=min(plan.add_per_request, num_experts),
        add=min(plan.add, num_experts),
        mass=plan.mass,
        target_per_rank=plan.target_per_rank,
        fill_ranks=plan.balance == "fill",
        budget=_resolve_budget(plan, router, num_experts),
        drop=plan.drop,
        by_votes=by_votes,
        confidence=plan.confidence,
        max_voters=plan.max_voters,
        min_votes=plan.min_votes,
        utility_full=utility_full,
        coverage=plan.coverage,
        reach=None if plan.max_rank is None or plan.max_rank >= num_experts else plan.max_rank,
        rescue=plan.can_rescue,
        columns=plan.kmax or router.top_k,
        scaling=router.scaling,
        fill=fill,
        block_size=block_size,
    )


def supports(plan: SelectionPlan, router: Router, batch: Batch, num_rows: int, num_experts: int) -> bool:
    """Whether the kernel serves the plan on logits [num_rows, num_experts]."""
    num_groups = _count_groups(router)
    tile = make_tile(plan, router, batch, num_rows, num_experts)
    unserved = (
        plan.ranks_experts and (plan.ranking == "static" or plan.scope == "request"),
        num_groups > 1 and (num_experts != tile.experts or num_groups != _round_up(num_groups)),
        num_rows > MAX_ROWS or num_experts > MAX_EXPERTS or router.top_k > MAX_TOP_K,
        tile.rows * tile.experts > MAX_TILE,
    )
    return not any(unserved)


def make_tile(
    plan: SelectionPlan, router: Router, batch: Batch, num_rows: int, num_experts: int, block_size: int = 0
) -> Tile:
    """One program where the batch is small, or where one row's voice or rescue may change every other; else as many as
    it takes.
    """
    tokens = batch.tokens_per_request if plan.add_per_request else 1
    request = _round_up(tokens)
    requests = num_rows // tokens
    experts = _round_up(num_experts)
    rows = max(MIN_ROWS, _round_up(requests) * request)
    if rows * experts > SINGLE_PROGRAM and not plan.can_rescue and plan.confidence is None:
        rows = max(MIN_ROWS, request, _round_up(-(-num_rows // MAX_PROGRAMS)))
    programs = -(-requests // (rows // request))
    columns = _round_up(plan.kmax or router.top_k)
    all_rows = rows * _round_up(programs)
    slots = all_rows * columns
    return Tile(
        rows=rows,
        experts=experts,
        request=request,
        columns=columns,
        programs=programs,
        partials=max(MIN_ROWS, _round_up(programs)),
        narrow=programs * rows * experts <= 1 << (31 - 20),
        all_rows=all_rows,
        slots=slots,
        positions=_round_up(count_blocks(slots, num_experts, block_size) * block_size) if block_size else 0,
    )


def count_blocks(slots: int, experts: int, block_size: int) -> int:
    """The most blocks that so many slots of at most so many experts fill."""
    groups = min(slots, experts)
    return groups + (slots - groups) // block_size


def _resolve_budget(plan: SelectionPlan, router: Router, num_experts: int) -> int | None:
    """Votes keep at least as many experts as a row uses."""
    if plan.budget is None:
        return None
    return min(max(plan.budget, router.top_k if plan.ranking == "votes" else 1), num_experts)


def _count_groups(router: Router) -> int:
    """1 where every group is among the best."""
    if router.num_expert_group is None or router.topk_group is None or router.topk_group >= router.num_expert_group:
        return 1
    return router.num_expert_group


def _round_up(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()
