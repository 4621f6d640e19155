"""Paged experts: what SGLang refuses once it builds the model, refused before; how far decode graphs are captured."""

from typing import Any

from ..policies.bounds import fits_slots
from ..policies.schedule import Schedule
from ..refusal import refusal
from ..types import Router
from ..upstream.server import pages_experts, resolved, spell
from .arguments import read_arguments
from .moe_model import MoeModel

ONE_GPU = ("tp_size", "ep_size", "pp_size", "dp_size")
FLAG = "--paged-experts-num-resident"


def check_paging(config: Any, model: MoeModel) -> None:
    """Raise `ExpertPolicyError` for resolved arguments that page experts where SGLang or the stage cannot."""
    if not pages_experts(config):
        return
    slots = config.paged_experts_num_resident
    if slots is None or slots < model.top_k:
        raise refusal(FLAG, slots, f"a row takes {model.top_k} experts; allowed is at least that")
    for name in ONE_GPU:
        if getattr(config, name) > 1:
            raise refusal(f"--{name.replace('_', '-')}", getattr(config, name), "--enable-paged-experts allows 1")
    if config.speculative_algorithm is not None:
        raise refusal("--speculative-algorithm", config.speculative_algorithm, "--enable-paged-experts allows none")
    if config.enable_eplb:
        raise refusal("--enable-eplb", "on", "--enable-paged-experts allows off")
    if spell(config.load_format) == "dummy":
        raise refusal("--load-format", "dummy", "--enable-paged-experts needs weights; allowed is another")


def count_slots(config: Any, num_experts: int) -> int | None:
    """How many of a layer's experts are loaded at once; None where all are."""
    slots = config.paged_experts_num_resident if pages_experts(config) else None
    return slots if slots is not None and slots < num_experts else None


def fits(schedule: Schedule | None, rows: int, top_k: int, num_experts: int, slots: int) -> bool:
    """Whether a decode step of so many rows is sure to have no more experts active than slots, in every layer."""
    if num_experts <= slots:
        return True
    if schedule is None or schedule.reason_to_skip("decode", rows) is not None:
        return rows * top_k <= slots
    plans = schedule.plans_at(rows)
    return all(fits_slots(plan, Router(top_k), num_experts, rows, 1, slots) for plan in plans)


def find_limit(server_args: Any, requests: int, top_k: int, num_experts: int, slots: int) -> int:
    """The most requests of a decode graph: `requests`, or SGLang's sizes beyond up to the first that does not fit."""
    arguments = read_arguments(server_args)
    if arguments is None:
        return requests
    for size in sorted(resolved(server_args).cuda_graph_config.decode.bs or []):
        if size > requests and not fits(arguments.schedule, size, top_k, num_experts, slots):
            break
        requests = max(requests, size)
    return requests


def list_paging_warnings(schedule: Schedule, model: MoeModel, config: Any, sizes: tuple[int, ...]) -> list[str]:
    """What to warn of: decode graphs that are not captured for all of `sizes`, slots that cut what the batch adds."""
    slots = count_slots(config, model.num_experts)
    if slots is None:
        return []
    start = f"{FLAG} {slots}: "
    warnings = []
    too_many = [size for size in sizes if not fits(schedule, size, model.top_k, model.num_experts, slots)]
    if too_many:
        warnings.append(
            f"{start}{too_many[0]} rows may need more experts, so that batches of {too_many[0]} and more run without a "
            "CUDA graph"
        )
    for rows in [size for size in sizes if size not in too_many][-1:]:
        for plan in schedule.plans_at(rows):
            need = 0 if plan is None else plan.warm_up(Router(model.top_k)) * rows + plan.add
            if need > slots:
                warnings.append(
                    f"{start}k0 x {rows} rows + add come to {need}: of what the batch adds, as many as fit are loaded"
                )
    return list(dict.fromkeys(warnings))
