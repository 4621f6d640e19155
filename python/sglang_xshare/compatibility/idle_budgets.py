"""What is served without an effect, each a warning with its number: budgets, and overrides that no batch meets."""

from __future__ import annotations

from typing import Any

from ..policies import bounds
from ..policies.common import spell_range
from ..policies.plan import KEYS, SelectionPlan
from ..policies.schedule import Schedule
from ..types import Router
from ..upstream.batches import Batches
from ..upstream.server import attention_dp_size, spell
from .moe_model import MoeModel

CAPTURED = "the largest batch captured:"


def largest_batch(config: Any) -> tuple[int, str] | None:
    """(requests, what limits them) of the largest batch of a server with these resolved arguments: those it runs at
    once, else those it captures a graph for. None where it does neither.
    """
    if config.max_running_requests:
        return config.max_running_requests, "--max-running-requests"
    graphs = getattr(config, "cuda_graph_config", None)
    if graphs is None or not graphs.decode.max_bs or spell(graphs.decode.backend) == "disabled":
        return None
    return graphs.decode.max_bs * attention_dp_size(config), CAPTURED


def list_idle_budgets(
    schedule: Schedule,
    plans: list[SelectionPlan],
    model: MoeModel,
    *,
    ranks: int = 1,
    batch: tuple[int, str] | None = None,
    tokens: int = 1,
    paged: bool = False,
) -> list[str]:
    """What to warn of: each of a schedule's plans that drops no expert of a model on `ranks` expert-parallel ranks, or
    none up to its largest `batch` (as `largest_batch` says) of `tokens` a request; `mass` beside `add`; and
    `free_residents`. Plans of a server whose experts are `paged` are warned of in `paging.py`.
    """
    router = Router(top_k=model.top_k)
    warnings = []
    for plan in plans:
        if paged and plan.takes_residents:
            continue
        if plan.free_residents:
            warnings.append(
                "free_residents = True: all experts are loaded here, so that it changes nothing; with "
                "--enable-paged-experts, and fewer slots than experts, it does"
            )
        if not bounds.can_drop(plan, router, model.num_experts, ranks=ranks):
            need = bounds.idle_budget(plan, router, model.num_experts, model.num_experts, model.num_experts, ranks)
            remedy = f"; with {need[0]} below {need[1]} it can" if need else ""
            warnings.append(f"this plan ({_spell(plan)}) never drops one of {model.num_experts} experts{remedy}")
            continue
        if plan.mass and plan.add:
            warnings.append(
                f"mass = {plan.mass:g} beside add = {plan.add}: the batch adds {plan.add} experts first, and mass only "
                "ever adds more; add = 0 leaves it to mass"
            )
        if batch is not None:
            requests, limit = batch
            rows = _largest_rows(schedule, plan, model, requests * tokens)
            need = bounds.idle_budget(plan, router, model.num_experts, rows, tokens, ranks) if rows else None
            if need:
                key, enough = need
                never = "drops no expert of a captured batch" if limit == CAPTURED else "never drops an expert"
                warnings.append(
                    f"{key} = {getattr(plan, key)}: {enough} hold all that {rows} rows want, the most it is for "
                    f"({limit} {requests}), so that this plan {never}"
                )
    return list(dict.fromkeys(warnings))


def list_unmet_overrides(schedule: Schedule, batches: Batches) -> list[str]:
    """What to warn of: each override by batch size that no step of the server has, and that no captured batch has as
    many rows as the policy asks for.
    """
    warnings = []
    if batches.captured and batches.captured[-1] < schedule.min_rows:
        warnings.append(
            f"min_rows = {schedule.min_rows}: no captured batch has so many rows ({batches}), so that only a "
            "larger one selects"
        )
    for override in schedule.by_rows:
        last = min(override.last, schedule.max_rows or override.last)
        if not batches.meet(max(override.first, schedule.min_rows), last):
            warnings.append(
                f"by_rows {spell_range(override.first, override.last)}: no step of this server has so many rows "
                f"({batches}), so that it never applies"
            )
    return warnings


def _spell(plan: SelectionPlan) -> str:
    """The keys of a plan that are not the algebra's defaults."""
    own = {name: getattr(plan, name) for name in KEYS}
    return ", ".join(f"{name} = {value}" for name, value in own.items() if value != getattr(SelectionPlan, name))


def _largest_rows(schedule: Schedule, plan: SelectionPlan, model: MoeModel, most: int) -> int:
    """The most router rows, of `most`, that a step under this plan can have; 0 where it has none."""
    most = min(most, schedule.max_rows or most)
    # A plan changes only where an override begins or ends.
    ends = {most, *(n for override in schedule.by_rows for n in (override.first - 1, override.last))}
    sizes = sorted((n for n in ends if schedule.min_rows <= n <= most), reverse=True)
    layers = range(model.num_layers)
    return next((n for n in sizes if any(schedule.plan(layer, n) == plan for layer in layers)), 0)
