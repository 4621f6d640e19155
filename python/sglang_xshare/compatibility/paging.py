"""The batch sizes for which SGLang captures a decode graph if experts are paged.

With paged experts, each layer holds at most `slots` experts on the GPU.
"""

from dataclasses import replace
from typing import Any

from ..policies.bounds import fits_slots
from ..policies.schedule import Schedule
from ..types import Router
from ..upstream.batches import Batches
from ..upstream.graphs import find_cap, keep_sizes, limit_sizes
from ..upstream.server import pages_experts, resolved
from .arguments import read_arguments


def fits(schedule: Schedule | None, rows: int, top_k: int, num_experts: int, slots: int) -> bool:
    """Return True if a decode step of `rows` rows never has more than `slots` active experts in a layer."""
    if num_experts <= slots:
        return True
    if schedule is None or schedule.reason_to_skip("decode", rows) is not None:
        return rows * top_k <= slots
    plans = schedule.plans_at(rows)
    return all(fits_slots(plan, Router(top_k), num_experts, rows, 1, slots) for plan in plans)


def find_limit(server_args: Any, requests: int, top_k: int, num_experts: int, slots: int | None) -> int:
    """Return the largest batch size for which SGLang may capture a decode graph if experts are paged.

    `requests` is SGLang's own limit, `slots` // top-k. Return this limit if the stage is off, if `slots` is not
    known yet (None), or if SGLang captures no decode graphs.
    """
    arguments, decode = read_arguments(server_args), resolved(server_args).cuda_graph_config.decode
    if arguments is None or not decode.bs:
        return requests
    largest = max(keep_sizes(decode))  # before SGLang limits its list
    if slots is None:
        return requests
    return find_cap(largest, lambda size: fits(arguments.schedule, size, top_k, num_experts, slots))


def limit_batches(batches: Batches, schedule: Schedule | None, config: Any, top_k: int, num_experts: int) -> Batches:
    """Return `batches` with only the captured sizes that a server with paged experts captures under `schedule`.

    Without paged experts, return `batches`. A size whose active experts may not fit the page slots is not captured, so
    SGLang does not pad a batch to this size.
    """
    if not (pages_experts(config) and batches.captured):
        return batches
    slots = config.paged_experts_num_resident
    if slots is None:  # SGLang sizes the slots later
        return replace(batches, captured=())
    cap = find_cap(batches.captured[-1], lambda size: fits(schedule, size, top_k, num_experts, slots))
    return replace(batches, captured=tuple(limit_sizes(batches.captured, cap)))
