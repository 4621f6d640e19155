"""An MoE layer under a policy: it selects experts from router logits, in the form that its MoE runner accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ..policies.plan import SelectionPlan
from ..selection import prepare_call, select
from ..selection.cpu_call import Call
from ..selection.slots import drop_slots, refill_slots
from ..types import Batch, RunnerSlots, Selection, Tally
from ..upstream.paging import count_slots
from ..upstream.router import read_router
from ..upstream.routing import carry, folds_scaling, num_shared_slots, record_routed, scales_unnormalized_groups
from ..upstream.triton_kernels import find_contract
from . import handover
from .frame import CurrentFrame, ModelForward
from .placement import Placement
from .step import Step

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets


class Convention(Enum):
    """The form in which an MoE runner accepts a selection.

    - FILLED: each empty slot contains an active expert with weight 0.
    - DROPPED: each empty slot contains the id -1.
    - MASKED: the runner gets masked logits instead of slots.
    """

    FILLED = "filled"
    DROPPED = "dropped"
    MASKED = "masked"


FILLED, DROPPED, MASKED = Convention
MASKING = RunnerSlots(masked=True)
MAX_CALLS = 1024
"""The maximum number of compiled calls that a layer keeps. Each combination of a plan and a step's shape has one call.
"""


class Layer:
    """An MoE layer: its router, and the form in which its MoE runner accepts a selection.

    `plain_config` and `selecting_config` are copies of the layer's `TopKConfig` that refer to this object.
    `plain_config` replaces the config in SGLang's router. With `selecting_config`, the router calls `choose` to select
    experts.

    - `renumbers`: SGLang replaces each selected id by a table lookup, so `choose` must not return the id -1.
    - `runner_ranks_logits`: if the layer does not select experts, the MoE runner gets logits and ranks them itself.
    - `takes_kmax`: the MoE runner accepts more or fewer columns than the model's top-k.
    - `recorded`: --enable-return-routed-experts returns the selected experts.
    - `paging`: the result of `find_paging` for the layer's experts.

    A layer stores no state of a forward. This state is in `current_frame`, which all layers of a model share. The lists
    in this state have one entry for each layer, and `index` is the layer's position. Raises ValueError if the stage
    does not support the router.
    """

    def __init__(
        self,
        layer_id: int,
        topk_config: Any,
        placement: Placement | None,
        *,
        convention: Convention = FILLED,
        renumbers: bool = False,
        runner_ranks_logits: bool = False,
        takes_kmax: bool = True,
        recorded: bool = False,
        paging: Any = None,
        current_frame: CurrentFrame | None = None,
        index: int = 0,
    ) -> None:
        self.layer_id = layer_id
        self.convention, self.renumbers, self.runner_ranks_logits = convention, renumbers, runner_ranks_logits
        self.takes_kmax = takes_kmax
        scaling = topk_config.routed_scaling_factor or 1.0
        on_output = topk_config.apply_routed_scaling_factor_on_output
        # If SGLang would scale the weights, the layer scales them instead: SGLang scales only the first top-k columns,
        # and a plan with `kmax` may have more columns.
        grouped = topk_config.use_grouped_topk
        scales = on_output and (topk_config.renormalize or not grouped or scales_unnormalized_groups())
        scales = scales or folds_scaling(topk_config)
        self.router = replace(read_router(topk_config), scaling=scaling if scales else 1.0)
        self.num_shared = num_shared_slots(topk_config)
        self.placement = placement
        self.paging = paging
        self.current_frame, self.index = current_frame or CurrentFrame(), index
        empty = convention == DROPPED and not renumbers
        self.slots = RunnerSlots(empty=empty)
        # If `on_output` is False, the model applies the scaling factor later. SGLang then gives a shared expert the
        # weight 1 / scaling, so its final weight is 1.
        weight = 1.0 if on_output else 1.0 / scaling
        self.with_shared = RunnerSlots(shared=self.num_shared, shared_weight=weight, empty=empty)
        # EPLB and paged experts replace the selected ids, so an alignment of the selected ids would be wrong.
        self.offers = handover.Offers(are_final=convention == FILLED and not renumbers and paging is None)
        self._calls: dict[tuple[Any, ...], tuple[SelectionPlan, Call | None]] = {}
        """The compiled calls on a CPU, for each plan and shape of a step. A call is None if `select` uses another
        backend.

        A call does not check its inputs, because `select` has checked the same plan and shape before. Each value also
        holds the plan of its key. So the plan stays alive, and no other plan can get its `id()`.
        """
        self._aligned = {slots: replace(slots, aligned=True) for slots in (self.slots, self.with_shared)}
        self.plain_config = carry(topk_config, self)
        route: dict[str, Any] = {"custom_routing_function": self.choose}
        # `choose_recorded` replaces SGLang's record, because that record would contain the ids that fill empty slots.
        if recorded:
            route = {"custom_routing_function": self.choose_recorded, "allow_routed_experts_capture": False}
        own = replace(topk_config, **route, use_grouped_topk=False, apply_routed_scaling_factor_on_output=False)
        self.selecting_config = carry(own, self)

    @property
    def paging_slots(self) -> int | None:
        """The number of page slots. It is None if all experts are loaded, and 0 until SGLang has set the number."""
        return None if self.paging is None else count_slots(self.paging)

    @property
    def model_forward(self) -> ModelForward:
        """The running forward of the model."""
        frame = self.current_frame.frame
        assert frame is not None
        assert frame.model_forward is not None
        return frame.model_forward

    @property
    def step(self) -> Step:
        """The step of the running forward."""
        step = self.model_forward.step
        assert step is not None
        return step

    def route(self, logits: torch.Tensor) -> Any:
        """Return `selecting_config` if the layer selects experts for `logits` [n, N], else `plain_config`."""
        return self.selecting_config if self._begin_routing(logits) else self.plain_config

    def _begin_routing(self, logits: torch.Tensor) -> bool:
        """Count what `observe` would select from `logits` [n, N]. Return whether the layer selects experts for them.

        If the layer routes outside of the model's forward, mark the frame, so `end_forward` counts "no_context".
        """
        model_forward = self.current_frame.model_forward
        if model_forward is None:
            frame = self.current_frame.frame
            if frame is not None and frame.key is not None:
                frame.outcome = "no_context"
            return False
        assignment = model_forward.assignments[self.index]
        if assignment.observed:
            self._observe(assignment.observed, self.collect(logits))
        return assignment.plan is not None and not assignment.observed

    def _observe(self, plans: Sequence[SelectionPlan], logits: torch.Tensor) -> None:
        """Count what each observed plan would select from `logits` [n, N]. Equal plans select only once."""
        model_forward, chosen = self.model_forward, dict[SelectionPlan, Selection]()
        batch = model_forward.find_batch(self.index)
        for plan, counted in zip(plans, model_forward.tallies, strict=True):
            tally = counted.of(self.index, logits)
            if plan not in chosen:
                chosen[plan] = self.select(logits, plan, batch, tally=tally)
            elif tally is not None:
                tally.take(chosen[plan])
        model_forward.selections[self.index] = chosen[plans[0]]

    def join(self, num_experts: int, device: str) -> None:
        """Select experts although this rank has no rows: the other ranks wait for this rank's part of the gather."""
        model_forward = self.current_frame.model_forward
        if model_forward is None or model_forward.assignments[self.index].plan is None:
            return
        rows = 0 if self.step.gather is not None else self.step.rows
        logits = torch.zeros(rows, num_experts, device=device)
        if self._begin_routing(logits):
            self.choose(logits, logits, self.router.top_k, self.router.renormalize)

    def choose(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [n, k] float32 and expert ids [n, k] int32.

        This method is SGLang's custom routing function. `topk` includes the columns of fused shared experts if SGLang
        expects the router to return these columns. Raises RuntimeError if the router has another number of rows than
        the step, because the rows of requests and the padding rows would be mixed up.
        """
        slots = self.with_shared if topk > self.router.top_k else self.slots
        gather, rows = self.step.gather, len(gating_output)
        if gather is None and self.offers.are_wanted(rows):
            slots = self._aligned[slots]
        out = self._select_by_plan(gating_output if gather is None else self.collect(gating_output), slots)
        if out.alignment is not None:
            num_experts = len(out.active) + slots.shared
            self.model_forward.offer = self.offers.make(out.topk_ids, num_experts, out.alignment)
        if gather is None:
            return out.topk_weights, out.topk_ids
        return gather.keep(out.topk_weights, rows), gather.keep(out.topk_ids, rows)

    def choose_recorded(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `choose`, and record the ids for SGLang. Slots with weight 0 are recorded as -1."""
        weights, ids = self.choose(*args, **kwargs)
        record_routed(self.plain_config, self.layer_id, drop_slots(ids, weights))
        return weights, ids

    def finish(self, ids: torch.Tensor, weights: torch.Tensor, num_token_non_padded: Any = None) -> torch.Tensor:
        """Rewrite the empty slots of `ids` [n, columns] for the MoE runner, after SGLang has changed the ids.

        SGLang renumbers the ids for EPLB and for paged experts. If `num_token_non_padded` is not None, SGLang has also
        written the id -1 or 0 to padding rows. Some runners do not accept -1, and 0 would activate expert 0.
        """
        if not self.renumbers and num_token_non_padded is None:
            return ids
        self.model_forward.offer = None  # the offered alignment is for the ids before the change
        return drop_slots(ids, weights) if self.convention == DROPPED else refill_slots(ids, weights)

    def prepare(self, output_format: Any, logits: torch.Tensor) -> tuple[Any, Any]:
        """Return the output format and the logits [n, N] that SGLang's router uses instead of the arguments.

        If the layer does not select experts, or if its runner does not rank logits, the arguments are returned
        unchanged. With the convention MASKED, the returned logits are masked. With any other convention, the returned
        format is STANDARD. For triton_kernels the result may be (None, the finished output of the router). The caller
        then returns this output without calling `routing()`.
        """
        if not self.runner_ranks_logits or not self._begin_routing(logits):
            return output_format, logits
        if self.convention != MASKED:
            return type(output_format).STANDARD, logits
        if output_format == type(output_format).BYPASSED:
            logits = logits.bfloat16()  # the runner ranks bfloat16 logits
        elif self.router.scaling == 1 and (contract := find_contract(logits, self.router.top_k)) is not None:
            out = self._select_by_plan(logits, contract.slots)
            return None, contract.pack(out.topk_ids, out.topk_weights, logits)
        out = self._select_by_plan(logits, MASKING)
        assert out.masked_logits is not None
        return output_format, out.masked_logits

    def _select_by_plan(self, logits: torch.Tensor, slots: RunnerSlots) -> Selection:
        """Select experts by the layer's plan, count them, and store the selection in `model_forward`."""
        model_forward, index = self.model_forward, self.index
        step, assignment = model_forward.step, model_forward.assignments[index]
        plan, buffer = assignment.plan, assignment.buffer
        assert step is not None
        assert plan is not None
        batch = model_forward.find_batch(index)
        tally = model_forward.tallies[0].of(index, logits) if model_forward.tallies else None
        # Keying by `id()` is safe: `_calls` keeps the plan alive, and the layer keeps its slots.
        place = id(plan), id(slots), logits.shape, step.rows, batch.tokens_per_request, batch.exact is None
        known = self._calls.get(place) if buffer is None else None
        if known is not None and known[1] is not None:
            selection = known[1](logits, batch, self._find_rank_of_expert(plan), tally)
        else:
            selection = self.select(logits, plan, batch, slots, tally, buffer)  # `select` checks its arguments
            if known is None and buffer is None:
                if len(self._calls) >= MAX_CALLS:
                    self._calls.clear()
                self._calls[place] = plan, prepare_call(logits, plan, self.router, batch, slots)
        model_forward.selections[index] = selection
        return selection

    def _find_rank_of_expert(self, plan: SelectionPlan) -> torch.Tensor | None:
        """Return the expert-parallel rank of each expert, [N] int, or None if `plan` does not use ranks."""
        if plan.target_per_rank is None or self.placement is None:
            return None
        return self.placement.rank_of_expert(self.layer_id)

    def collect(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks if the step has a gather, else `logits`. Raises RuntimeError like `choose`."""
        if self.step.gather is None:
            return logits
        # `join` passes 0 rows for a rank that has only padding rows, although the gather counts the padding rows.
        rows = self.step.gather.own
        if len(logits) not in (0, rows):
            raise RuntimeError(f"MoE layer {self.layer_id}: router rows of the rank must be {rows} (got {len(logits)})")
        return self.step.gather.collect(logits)

    def select(
        self,
        logits: torch.Tensor,
        plan: SelectionPlan,
        batch: Batch,
        slots: RunnerSlots | None = None,
        tally: Tally | None = None,
        budgets: Budgets | None = None,
    ) -> Selection:
        """Select experts from `logits` [n, N] by `plan`. Raises RuntimeError like `choose`."""
        rows = self.step.rows
        if len(logits) != rows:
            raise RuntimeError(f"MoE layer {self.layer_id}: router rows must be {rows} (got {len(logits)})")
        ranks = self._find_rank_of_expert(plan)
        return select(logits, plan, self.router, batch, ranks, slots=slots, tally=tally, budgets=budgets)
