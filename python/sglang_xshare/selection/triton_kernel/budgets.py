"""A plan's numbers on the device. The kernel reads them when it runs, so they change without another compilation."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...policies.plan import KEYS, SelectionPlan
from ..scores import DEPTHS, weigh_depths

COUNTS: tuple[str, ...] = ("k0", "add_per_request", "add", "target_per_rank", "budget", "drop")
COUNTS += ("max_voters", "min_votes", "max_rank", "warm_rows", "max_add")
SHARES = ("p", "beta", "mass", "confidence", "own_share", "acceptance")
NUMBERS = COUNTS + SHARES
"""Keys of a plan that are read at run time, in the order in which a buffer holds them."""
K0, ADD_PER_REQUEST, ADD, TARGET_PER_RANK, BUDGET, DROP, MAX_VOTERS, MIN_VOTES, MAX_RANK, WARM_ROWS, MAX_ADD = (
    tl.constexpr(NUMBERS.index(name)) for name in COUNTS
)
P, BETA, MASS, CONFIDENCE, OWN_SHARE, _ = (tl.constexpr(NUMBERS.index(name)) for name in SHARES)
CHANCES, DEEPEST = tl.constexpr(len(NUMBERS)), tl.constexpr(DEPTHS - 1)

ALL = 2**31 - 1
ABSENT = {"target_per_rank": 0, "budget": 0, "beta": 0, "mass": 0, "confidence": 1}
"""Numbers in place of None, by key; ALL for the other keys. With this number a key has no effect."""
STEPS: tuple[str, ...] = ("p", "beta", "add_per_request", "add", "mass", "target_per_rank", "max_rank", "own_share")
STEPS += ("acceptance", "warm_rows", "max_add")
"""Keys for which a kernel has no code if its plan has the key's default."""


class Budgets:
    """The numbers of a plan in `values` [17 + DEPTHS] int64 on the device: NUMBERS, then a factor by draft depth.

    Counts are integers, and all other numbers are the bits of a float64. Kernels read the numbers when they run, and
    kernels of a captured graph at every replay. `write`, or a kernel, may change the numbers.
    """

    def __init__(self, plan: SelectionPlan, device: torch.device) -> None:
        self.plan = plan
        """The plan that chose the kernel; `write` does not change it."""
        self.values = encode(plan).to(device)

    def write(self, plan: SelectionPlan) -> None:
        """Write the numbers of another plan, on the current stream. Raises ValueError as `check` does."""
        self.check(plan)
        self.values.copy_(encode(plan))

    def weigh(self, drafts: torch.Tensor) -> None:
        """Write only the factors of drafts, the result of `encode_drafts`; from pinned memory without waiting."""
        self.values[-len(drafts) :].copy_(drafts, non_blocking=True)

    def check(self, plan: SelectionPlan) -> None:
        """Raise ValueError naming a changed key that is not in NUMBERS, or for which the kernel has no code."""
        took, takes = list_steps(self.plan), list_steps(plan)
        for name in KEYS:
            old, new = getattr(self.plan, name), getattr(plan, name)
            if old != new and (name not in NUMBERS or (takes.get(name) and not took[name])):
                raise ValueError(f"{name} = {new!r}: must be the value that the kernel was made for, {old!r}")
        for name, old, new in (
            ("budget or drop", self.plan.ranks_experts, plan.ranks_experts),
            ("confidence", self.plan.confidence is not None, plan.confidence is not None),
        ):
            if old != new:
                raise ValueError(
                    f"{name}: must be as in the plan that the kernel was made for, {'set' if old else 'absent'}"
                )


def encode(plan: SelectionPlan) -> torch.Tensor:
    """Return the numbers of a plan [17 + DEPTHS] int64 on the host."""
    given = {name: getattr(plan, name) for name in NUMBERS}
    values: dict[str, Any] = {name: ABSENT.get(name, ALL) if value is None else value for name, value in given.items()}
    values["p"] = plan.p if plan.p < 1 else float("inf")  # no prefix reaches this share, even if scores round to 0
    counts = torch.tensor([values[name] for name in COUNTS], dtype=torch.int64)
    shares = torch.tensor([values[name] for name in SHARES[:-1]], dtype=torch.float64)
    return torch.cat([counts, shares.view(torch.int64), encode_drafts(plan.acceptance)])


def encode_drafts(acceptance: float) -> torch.Tensor:
    """Return the end of `encode`'s result [1 + DEPTHS] int64 on the host: `acceptance` and the factor of each depth."""
    chances = weigh_depths(acceptance).double()
    return torch.cat([torch.tensor([acceptance], dtype=torch.float64), chances]).view(torch.int64)


def list_steps(plan: SelectionPlan) -> dict[str, bool]:
    """Return, by key, whether the plan's kernel has code for the key, which kernels of other plans may lack."""
    return {"k0": plan.can_rescue} | {name: getattr(plan, name) != getattr(SelectionPlan, name) for name in STEPS}


@cache
def find_budgets(plan: SelectionPlan, device: torch.device) -> Budgets:
    """Return the plan's own budgets, which must not be written.

    The cache never evicts budgets, because a captured graph reads their memory. The numbers are copied from the host,
    so a first call inside a graph capture raises an error: the runs before the capture must fill the cache.
    """
    return Budgets(plan, device)


@triton.jit
def read_count(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Return a count as int32; the largest int32 means all."""
    return tl.load(budgets + key).to(tl.int32)


@triton.jit
def read_share(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Return a share as float64, so that products round like the reference's."""
    return tl.load(budgets + key).to(tl.float64, bitcast=True)


@triton.jit
def read_chance(budgets: tl.tensor, depth: tl.tensor) -> tl.tensor:
    """Return the factors [R, 1] fp32 of rows with a `depth` [R]."""
    place = tl.minimum(tl.maximum(depth, 0), DEEPEST)[:, None]
    return tl.load(budgets + CHANCES + place).to(tl.float64, bitcast=True).to(tl.float32)
