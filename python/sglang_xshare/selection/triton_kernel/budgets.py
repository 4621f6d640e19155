"""A plan's numbers on the device: what the kernel reads when it runs, so that they change without compiling anew."""

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
ABSENT = {
    "k0": ALL,
    "target_per_rank": 0,
    "budget": 0,
    "drop": ALL,
    "max_rank": ALL,
    "warm_rows": ALL,
    "max_add": ALL,
    "beta": 0,
    "mass": 0,
    "confidence": 1,
}
"""What None stands for: in a kernel that takes the step of its key, too, the step then changes nothing."""


class Budgets:
    """The numbers of a plan in `values` [17 + DEPTHS] int64 on the device, NUMBERS in turn, then what drafts of each
    depth count by: counts as they are, all else as the bits of a float64.

    Kernels read them when they run, those of a captured graph at every replay: `write`, or a kernel, may change them.
    """

    def __init__(self, plan: SelectionPlan, device: torch.device) -> None:
        self.plan = plan
        """What the kernel is chosen by; `write` leaves it."""
        self.values = encode(plan).to(device)

    def write(self, plan: SelectionPlan) -> None:
        """Change the numbers to those of another plan, in the order of the current stream. Raises as `check` does."""
        self.check(plan)
        self.values.copy_(encode(plan))

    def weigh(self, drafts: torch.Tensor) -> None:
        """Change what drafts count by alone, to what `encode_drafts` returns; of pinned memory without waiting."""
        self.values[-len(drafts) :].copy_(drafts, non_blocking=True)

    def check(self, plan: SelectionPlan) -> None:
        """Raise ValueError naming a key that takes another kernel: no number, or a step that the first plan lacks."""
        took, takes = list_steps(self.plan), list_steps(plan)
        for name in KEYS:
            old, new = getattr(self.plan, name), getattr(plan, name)
            if old != new and (name not in NUMBERS or (takes.get(name) and not took[name])):
                raise ValueError(f"{name} = {new!r}: allowed without another kernel is what it was made for, {old!r}")
        for name, old, new in (
            ("budget or drop", self.plan.ranks_experts, plan.ranks_experts),
            ("confidence", self.plan.confidence is not None, plan.confidence is not None),
        ):
            if old != new:
                raise ValueError(f"{name}: allowed without another kernel is {'some' if old else 'none'}")


def encode(plan: SelectionPlan) -> torch.Tensor:
    """[17 + DEPTHS] int64 on the host."""
    given = {name: getattr(plan, name) for name in NUMBERS}
    values: dict[str, Any] = {name: ABSENT.get(name) if value is None else value for name, value in given.items()}
    values["p"] = plan.p if plan.p < 1 else float("inf")  # a share that no prefix reaches, whatever rounds to 0
    counts = torch.tensor([min(values[name], ALL) for name in COUNTS], dtype=torch.int64)
    shares = torch.tensor([values[name] for name in SHARES[:-1]], dtype=torch.float64)
    return torch.cat([counts, shares.view(torch.int64), encode_drafts(plan.acceptance)])


def encode_drafts(acceptance: float) -> torch.Tensor:
    """[1 + DEPTHS] int64 on the host: what `encode` ends with."""
    chances = weigh_depths(acceptance).double()
    return torch.cat([torch.tensor([acceptance], dtype=torch.float64), chances]).view(torch.int64)


def list_steps(plan: SelectionPlan) -> dict[str, bool]:
    """By key, whether the plan takes the step that this key is of, and that the kernels of other plans leave out."""
    return {
        "k0": plan.can_rescue,
        "p": plan.p < 1,
        "beta": plan.beta is not None,
        "add_per_request": plan.add_per_request > 0,
        "add": plan.add > 0,
        "mass": plan.mass is not None,
        "target_per_rank": plan.target_per_rank is not None,
        "max_rank": plan.max_rank is not None,
        "own_share": plan.own_share > 0,
        "acceptance": plan.acceptance < 1,
        "warm_rows": plan.warm_rows is not None,
        "max_add": plan.max_add is not None,
    }


@cache
def find_budgets(plan: SelectionPlan, device: torch.device) -> Budgets:
    """The plan's own, made once and never evicted, since a captured graph reads them; not to be written. Copied from
    the host, so that a first call inside a graph capture is an error: the runs before it fill the cache.
    """
    return Budgets(plan, device)


@triton.jit
def read_count(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """int32; the largest stands for all."""
    return tl.load(budgets + key).to(tl.int32)


@triton.jit
def read_share(budgets: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """float64, as the plan has it: products with it round as the reference's do."""
    return tl.load(budgets + key).to(tl.float64, bitcast=True)


@triton.jit
def read_chance(budgets: tl.tensor, depth: tl.tensor) -> tl.tensor:
    """[R, 1] fp32: what rows of a depth [R] count by."""
    place = tl.minimum(tl.maximum(depth, 0), DEEPEST)[:, None]
    return tl.load(budgets + CHANCES + place).to(tl.float64, bitcast=True).to(tl.float32)
