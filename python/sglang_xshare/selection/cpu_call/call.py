"""The compiled call behind `select()`. Torch computes the scores P, and a C++ function computes everything else.

P therefore has the same bits as in the torch backend.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import lru_cache

import torch

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, RunnerSlots, Selection, Tally, allocate_tally
from ..handled import find_unhandled
from ..scores import score
from ..slots import serve_runner
from .layout import pack
from .library import load

NOT_CLEAN, WRONG_WIDTH = 1, 3
"""Values of `Status` in csrc/plan.h. A call that returns one of these values has written nothing."""


def supports(plan: SelectionPlan, router: Router, batch: Batch, num_rows: int, num_experts: int) -> bool:
    """Return whether this machine has the compiled call and the call supports the plan. The shape does not matter."""
    return load() is not None and not find_unhandled(plan, __package__)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a C++ function can read the tensor: a plain tensor or parameter in this machine's memory."""
    return tensor.is_cpu and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def select(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
    slots: RunnerSlots | None,
    tally: Tally | None = None,
) -> Selection:
    """Select the batch's experts and each row's experts; see `sglang_xshare.selection.select`.

    Raises ValueError if this machine has no compiled call.
    """
    if not is_readable(logits):
        raise ValueError("backend = 'cpu': must be torch, because the logits are no plain tensor on a CPU")
    call = find_call(plan, router, logits.shape[1], batch.exact is not None, slots)
    return call(logits, batch, rank_of_expert, tally)


@lru_cache(maxsize=4096)
def find_call(
    plan: SelectionPlan, router: Router, num_experts: int, exact: bool = False, slots: RunnerSlots | None = None
) -> Call:
    """Return the compiled call for a plan and a router. `supports` must return True for the plan.

    A plan and a router are packed at their first use. Raises ValueError on a machine without the compiled call.
    """
    return Call(plan, router, num_experts, exact, slots)


class Call:
    """A compiled function with its packed plan and router. It selects a layer's experts in one call.

    If `exact` is True, rows may be exact.
    """

    def __init__(
        self, plan: SelectionPlan, router: Router, num_experts: int, exact: bool, slots: RunnerSlots | None
    ) -> None:
        library = load()
        if library is None:
            raise ValueError("backend = 'cpu': must be torch, because this machine has no compiled call")
        self.router, self.slots = router, slots
        self._run = library.select_experts
        self._packed = pack(plan, router, num_experts, exact, slots)
        self._address = ctypes.addressof(self._packed)
        self._num_experts = num_experts
        self._width = self._packed.columns + self._packed.shared

    def __call__(
        self, logits: torch.Tensor, batch: Batch, rank_of_expert: torch.Tensor | None, tally: Tally | None
    ) -> Selection:
        """Return the selection for logits [n, N], and write the counted tensors to `tally`.

        The call checks only the number of columns. Raises RuntimeError if exact rows need more columns than the call
        has. This happens only if the call was made with `exact` False. Raises MemoryError if memory is short.
        """
        router, rows = self.router, logits.shape[0]
        given = logits if logits.dtype is torch.float32 or logits.dtype is torch.bfloat16 else logits.float()
        given = given.contiguous()
        # `new_empty` allocates on the logits' device, whatever torch's default device is.
        ids = given.new_empty((rows, self._width), dtype=torch.int32)
        weights = given.new_empty((rows, self._width), dtype=torch.float32)
        selected = given.new_empty(self._num_experts, dtype=torch.bool)
        if tally is None:
            tally = allocate_tally(given.new_empty, rows, self._num_experts)
        # The tuple contains tensors and not addresses, because a converted tensor must live until the call returns.
        inputs = (
            None if batch.valid is None else batch.valid.contiguous(),
            None if batch.exact is None else batch.exact.contiguous(),
            None if batch.resident is None else batch.resident.contiguous(),
            None if router.correction_bias is None else router.correction_bias.float().contiguous(),
            None if router.expert_scale is None else router.expert_scale.float().contiguous(),
            None if rank_of_expert is None else rank_of_expert.long().contiguous(),
            None if batch.depth is None else batch.depth.contiguous(),
        )
        scores = score(given, router.scoring)
        while status := self._run(
            self._address,
            given.data_ptr(),
            scores.data_ptr(),
            *[None if one is None else one.data_ptr() for one in inputs],
            given.dtype is torch.bfloat16,
            rows,
            batch.tokens_per_request,
            0 if batch.slots is None else min(batch.slots, self._num_experts),
            self._width,
            ids.data_ptr(),
            weights.data_ptr(),
            selected.data_ptr(),
            tally.active.data_ptr(),
            tally.vanilla_active.data_ptr(),
            tally.kept_mass.data_ptr(),
            tally.rescued.data_ptr(),
        ):
            if status == WRONG_WIDTH:
                reason = f"got exact rows, which take {router.top_k}: make it with exact=True"
                raise RuntimeError(f"a call for rows of {self._width} experts {reason}")
            if status != NOT_CLEAN:
                raise MemoryError(f"selection from router_logits {list(given.shape)}: out of memory")
            # A NaN or +inf counts as -inf, so the second call finds clean logits.
            given = given.nan_to_num(-math.inf, -math.inf, -math.inf)
            scores = score(given, router.scoring)
        answer = Selection(ids, weights, selected, tally.active, tally.rescued, tally.vanilla_active, tally.kept_mass)
        if self.slots is None or not self.slots.masked:
            return answer
        answer = replace(answer, **serve_runner(answer, logits, router.top_k, self.slots))
        tally.active.copy_(answer.active)  # with masked logits a runner also loads the experts that complete its top-k
        return answer
