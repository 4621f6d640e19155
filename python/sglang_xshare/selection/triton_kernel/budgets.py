"""The numbers of a plan on the device. The kernel reads the numbers when it runs, so a change needs no compilation."""

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
"""The keys of a plan whose numbers the kernel reads at run time, in the order of the buffer."""
K0, ADD_PER_REQUEST, ADD, TARGET_PER_RANK, BUDGET, DROP, MAX_VOTERS, MIN_VOTES, MAX_RANK, WARM_ROWS, MAX_ADD = (
    tl.constexpr(NUMBERS.index(name)) for name in COUNTS
)
P, BETA, MASS, CONFIDENCE, OWN_SHARE, _ = (tl.constexpr(NUMBERS.index(name)) for name in SHARES)
CHANCES, DEEPEST = tl.constexpr(len(NUMBERS)), tl.constexpr(DEPTHS - 1)

ALL = 2**31 - 1
ABSENT = {"target_per_rank": 0, "budget": 0, "beta": 0, "mass": 0, "confidence": 1}
"""The number that stands for None, for each of these keys. With this number the key has no effect. For all other keys,
ALL stands for None.
"""
STEPS: tuple[str, ...] = ("p", "beta", "add_per_request", "add", "mass", "target_per_rank", "max_rank", "own_share")
STEPS += ("acceptance", "warm_rows", "max_add")
"""The keys for which a kernel has code only if its plan does not have the key's default."""


class Budgets:
    """The numbers of a plan on the device. The tensor `values` [17 + DEPTHS] int64 contains them.

    The numbers of the keys in NUMBERS come first, then one factor for each draft depth. Counts are integers. All other
    numbers are the bits of a float64. A kernel reads the numbers when it runs. In a captured CUDA graph it reads them
    at every replay. `write` or a kernel can change the numbers.
    """

    def __init__(self, plan: SelectionPlan, device: torch.device) -> None:
        self.plan = plan
        """The plan for which the kernel was made. `write` does not change it."""
        self.values = encode(plan).to(device)

    def write(self, plan: SelectionPlan) -> None:
        """Write the numbers of another plan, on the current stream. Raises ValueError as `check` does."""
        self.check(plan)
        self.values.copy_(encode(plan))

    def weigh(self, drafts: torch.Tensor) -> None:
        """Write only `acceptance` and the factors of the draft depths, which `encode_drafts` returns.

        The host does not wait if `drafts` is in pinned memory.
        """
        self.values[-len(drafts) :].copy_(drafts, non_blocking=True)

    def check(self, plan: SelectionPlan) -> None:
        """Raise ValueError if the kernel cannot compute this plan. The error names the key.

        The plan may differ from the kernel's plan only in the numbers of the keys in NUMBERS. The kernel must have code
        for every key that the plan uses.
        """
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
    """Return the numbers of a plan, a tensor [17 + DEPTHS] int64 on the host."""
    given = {name: getattr(plan, name) for name in NUMBERS}
    values: dict[str, Any] = {name: ABSENT.get(name, ALL) if value is None else value for name, value in given.items()}
    values["p"] = plan.p if plan.p < 1 else float("inf")  # no warm-up reaches this share, even if all scores round to 0
    counts = torch.tensor([values[name] for name in COUNTS], dtype=torch.int64)
    shares = torch.tensor([values[name] for name in SHARES[:-1]], dtype=torch.float64)
    return torch.cat([counts, shares.view(torch.int64), encode_drafts(plan.acceptance)])


def encode_drafts(acceptance: float) -> torch.Tensor:
    """Return `acceptance` and the factor of each draft depth, a tensor [1 + DEPTHS] int64 on the host.

    These are the last elements of the result of `encode`.
    """
    chances = weigh_depths(acceptance).double()
    return torch.cat([torch.tensor([acceptance], dtype=torch.float64), chances]).view(torch.int64)


def list_steps(plan: SelectionPlan) -> dict[str, bool]:
    """Return a bool for each key that needs code of its own. It is True if the plan's kernel has this code."""
    return {"k0": plan.can_rescue} | {name: getattr(plan, name) != getattr(SelectionPlan, name) for name in STEPS}


@cache
def find_budgets(plan: SelectionPlan, device: torch.device) -> Budgets:
    """Return the cached budgets of a plan. The caller must not write to them.

    The cache never evicts budgets, because a captured CUDA graph reads their memory. A first call during a graph
    capture raises an error, because it copies the numbers from the host. The runs before the capture must therefore
    fill the cache.
    """
    return Budgets(plan, device)


@triton.jit
def read_count(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Return a count as int32. The largest int32 means that there is no limit."""
    return tl.load(budgets + key).to(tl.int32)


@triton.jit
def read_share(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Return a share as float64, so products round as in the reference."""
    return tl.load(budgets + key).to(tl.float64, bitcast=True)


@triton.jit
def read_chance(budgets: tl.tensor, depth: tl.tensor) -> tl.tensor:
    """Return the factor [R, 1] fp32 of each row. `depth` [R] is the depth of each row."""
    place = tl.minimum(tl.maximum(depth, 0), DEEPEST)[:, None]
    return tl.load(budgets + CHANCES + place).to(tl.float64, bitcast=True).to(tl.float32)
