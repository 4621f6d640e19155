"""The experiment `routing`, which measures two ways to prepare the routing arrays of gpt-oss's MoE layers.

With the MoE runner `triton_kernel`, the layer masks the logits. Then SGLang's function `routing()` computes the arrays
for the matrix product with nine launches. With prebuilt arrays, the selection returns expert ids, and a single launch
builds the arrays. The experiment compares the arrays of both ways, and then measures both ways in turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmark.common.record import Record
from benchmark.common.variant import parse_plan
from benchmark.gpu.checks import measure_points
from benchmark.gpu.layer import spell_times
from benchmark.gpu.levers import spell_change
from benchmark.gpu.moe_layer import publish_arguments
from benchmark.gpu.table import Row
from benchmark.gpu.timing import repeat, time_alternating
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.upstream.triton_kernels import find_contract

PARTS, ROWS = ("128", "32"), (16, 8, 32, 4, 1)
"""The numbers of experts and the numbers of rows."""
TOP_K = 4
POLICIES = ("xshare:k0=4", "xshare:k0=0,add=24")
"""The policies. The first one drops no experts, so both ways must give equal arrays."""
LAYERS, ROUNDS = 36, 10
"""The number of repetitions in a graph, and the number of rounds. The many repetitions hide the launch of the graph."""
OLD, NEW = "mask and routing()", "select and arrays"


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a dict from the key of each point to the function that measures it."""
    shapes = [(int(experts), rows, policy) for experts, rows, policy in product(parts, ROWS, POLICIES)]
    return {point_key(*shape): partial(_time, *shape) for shape in shapes}


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure all points that are missing in the record. Return the first failure, or None."""
    return measure_points(record, list_points(parts))


def point_key(experts: int, rows: int, policy: str) -> str:
    """Return the key of a point in the record."""
    return f"{rows}x{experts}/{policy}"


def make_calls(experts: int, rows: int, policy: str) -> dict[str, Callable[[], Any]]:
    """Return the functions to measure for a shape, by name.

    Raises RuntimeError if the installed triton_kernels does not accept prebuilt arrays.
    """
    publish_arguments()
    from sglang.srt.layers.moe.topk import routing

    generator = torch.Generator().manual_seed(rows * experts)
    logits = torch.randn(rows, experts, generator=generator).to("cuda", torch.bfloat16)
    plan, router, batch = parse_plan(policy), Router(TOP_K), Batch()
    contract = find_contract(logits, TOP_K)
    if contract is None:
        raise RuntimeError("triton_kernels must be a version that takes prebuilt arrays")
    masking = RunnerSlots(masked=True)

    def old() -> Any:
        return routing(select(logits, plan, router, batch, slots=masking).masked_logits, TOP_K)

    def new() -> Any:
        chosen = select(logits, plan, router, batch, slots=contract.slots)
        return contract.pack(chosen.topk_ids, chosen.topk_weights, logits)

    chosen = select(logits, plan, router, batch, slots=contract.slots)
    alone = partial(contract.pack, chosen.topk_ids, chosen.topk_weights, logits)
    return {OLD: old, NEW: new, "routing() alone": partial(routing, logits, TOP_K), "arrays alone": alone}


def _time(experts: int, rows: int, policy: str) -> dict[str, Any]:
    calls = make_calls(experts, rows, policy)
    differs = ", ".join(find_differences(calls[OLD](), calls[NEW]())) if policy == POLICIES[0] else None
    us = time_alternating({name: partial(repeat, call, LAYERS) for name, call in calls.items()}, ROUNDS, LAYERS)
    print(f"{rows} x {experts}, {policy}: {spell_times(us)}", flush=True)
    return {"experts": experts, "rows": rows, "policy": policy, "mode_us": us, "differs": differs}


def find_differences(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """Return the names of all arrays that differ. Gate weights can differ by rounding to bf16."""
    expected, found = (dict(list_arrays("routing", tuple(routed))) for routed in (old, new))
    return [name for name in expected | found if not _agree(expected.get(name), found.get(name))]


def _agree(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None or expected.numel() != found.numel():
        return False
    if expected.is_floating_point():
        return torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=2**-12)
    return torch.equal(found.flatten().int(), expected.flatten().int())


def list_arrays(name: str, routed: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each array in nested tuples and dataclasses.

    A block schedule is cut after its last block. The matrix product does not read the rest, and its length can differ.
    """
    if isinstance(routed, torch.Tensor):
        yield name, routed
    elif isinstance(routed, tuple):
        for number, part in enumerate(routed):
            yield from list_arrays(f"{name}.{number}", part)
    elif is_dataclass(routed):
        parts: dict[str, Any] = {field.name: getattr(routed, field.name) for field in fields(routed)}
        if "block_schedule_data" in parts:
            totals = parts["block_offs_data"][:, -1].tolist()
            lines = zip(parts["block_schedule_data"], totals, strict=True)
            parts["block_schedule_data"] = tuple(line[:total] for line, total in lines)
        for field, value in parts.items():
            yield from list_arrays(f"{name}.{field}", value)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row that names the arrays that differ, and a row with both times for each shape."""
    checked = [point for point in points.values() if point.get("policy") == POLICIES[0]]
    if checked:
        wrong = [f"{one['rows']} x {one['experts']}: {one['differs']}" for one in checked if one["differs"]]
        yield Row("arrays beside routing()'s", "; ".join(wrong) or "equal", "equal", not wrong)
    for experts, count, policy in product(PARTS, ROWS, POLICIES):
        point = points.get(point_key(int(experts), count, policy))
        if point is not None:
            us = point["mode_us"]
            what = f"{count} tokens x {experts} experts, {policy}: {spell_times(us)}"
            yield Row(what, f"{spell_change(us[OLD], us[NEW])} us a layer")
