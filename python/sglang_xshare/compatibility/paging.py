"""The largest batch size for which SGLang captures a decode graph if experts are paged.

With paged experts, each layer holds at most `slots` experts on the GPU.
"""

from typing import Any

from ..policies.bounds import fits_slots
from ..policies.schedule import Schedule
from ..types import Router
from ..upstream.graphs import find_cap
from ..upstream.server import resolved
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
    arguments, sizes = read_arguments(server_args), resolved(server_args).cuda_graph_config.decode.bs
    if arguments is None or slots is None or not sizes:
        return requests
    schedule = arguments.schedule
    return find_cap(sizes, lambda size: fits(schedule, size, top_k, num_experts, slots))
