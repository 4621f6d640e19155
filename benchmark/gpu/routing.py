"""Experiment `routing`: what gpt-oss's layers launch between logits and matmul, with `routing()` and with our arrays.

Under `triton_kernel` a layer masks the logits and upstream's `routing()` derives its arrays in nine launches. With
prebuilt arrays the selection returns ids, and one launch builds them. Both are held to each other, then timed in turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu.checks import choose_parts, measure_points
from benchmark.gpu.levers import compare
from benchmark.gpu.table import Row

EXPERTS, ROWS = (128, 32), (16, 8, 32, 4, 1)
TOP_K = 4
POLICIES = ("xshare:k0=4", "xshare:k0=0,add=24")
"""The first drops nothing: the arrays of both ways must be equal."""
LAYERS, ROUNDS = 36, 10
"""Copies in a graph, so that its own launch is a small part."""
OLD, NEW = "mask and routing()", "select and arrays"


def measure(record: Record, parts: Sequence[str]) -> None:
    """Time every point that the record lacks. One that fails is recorded, stops no other, and is raised at the end."""
    names = choose_parts("routing", parts, map(str, EXPERTS))
    shapes = [(int(name), rows, policy) for name, rows, policy in product(names, ROWS, POLICIES)]
    if reason := measure_points(record, {point_key(*shape): partial(_time, *shape) for shape in shapes}):
        raise RuntimeError(reason)


def point_key(experts: int, rows: int, policy: str) -> str:
    """Return a point's key in the record."""
    return f"{rows}x{experts}/{policy}"


def make_calls(experts: int, rows: int, policy: str) -> dict[str, Callable[[], Any]]:
    """Return what is timed at a shape, by name. Raises RuntimeError where triton_kernels takes no arrays of ours."""
    import torch

    from benchmark.common.variant import parse_plan
    from benchmark.gpu.moe_layer import publish_arguments
    from sglang_xshare import Batch, Router, RunnerSlots, select
    from sglang_xshare.upstream.triton_kernels import find_contract

    publish_arguments()
    from sglang.srt.layers.moe.topk import routing

    generator = torch.Generator().manual_seed(rows * experts)
    logits = torch.randn(rows, experts, generator=generator).to("cuda", torch.bfloat16)
    plan, router, batch = parse_plan(policy), Router(TOP_K), Batch()
    contract = find_contract(logits, TOP_K)
    if contract is None:
        raise RuntimeError("this release's triton_kernels takes no arrays of ours")
    masking = RunnerSlots(masked=True)

    def old() -> Any:
        return routing(select(logits, plan, router, batch, slots=masking).masked_logits, TOP_K)

    def new() -> Any:
        chosen = select(logits, plan, router, batch, slots=contract.slots)
        return contract.pack(chosen.topk_ids, chosen.topk_weights, logits)

    chosen = select(logits, plan, router, batch, slots=contract.slots)
    alone = partial(contract.pack, chosen.topk_ids, chosen.topk_weights, logits)
    return {OLD: old, NEW: new, "routing() alone": partial(routing, logits, TOP_K), "arrays alone": alone}


def compile_point(experts: int, rows: int, policy: str) -> None:
    """Leave in Triton's cache what is timed at a shape."""
    for call in make_calls(experts, rows, policy).values():
        call()


def _time(experts: int, rows: int, policy: str) -> dict[str, Any]:
    from benchmark.gpu.timing import time_alternating

    calls = make_calls(experts, rows, policy)
    differs = find_difference(calls[OLD](), calls[NEW]()) if policy == POLICIES[0] else None
    times = time_alternating({name: partial(_repeat, call) for name, call in calls.items()}, ROUNDS)
    us = {name: [one / LAYERS for one in found] for name, found in times.items()}
    print(f"{rows} x {experts}, {policy}: " + ", ".join(f"{name} {mean(us[name]):.2f}" for name in us), flush=True)
    return {"experts": experts, "rows": rows, "policy": policy, "mode_us": us, "differs": differs}


def _repeat(call: Any) -> None:
    for _ in range(LAYERS):
        call()


def find_difference(old: Sequence[Any], new: Sequence[Any]) -> str | None:
    """Return the name of the first array that differs, if one does; gates may differ by a rounding to bf16.

    Schedules are left out: what lies behind their last block is read by nobody, and differs.
    """
    import torch

    found = dict(list_arrays("routing", tuple(new)))
    for name, expected in list_arrays("routing", tuple(old)):
        if expected.is_floating_point():
            same = torch.allclose(found[name].float(), expected.float(), rtol=2**-7, atol=2**-12)
        else:
            same = torch.equal(found[name].flatten().int(), expected.flatten().int())
        if not same:
            return name
    return None


def list_arrays(name: str, routed: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor) of what matmul reads: tuples and records of any depth, apart from schedules."""
    if hasattr(routed, "is_floating_point"):
        yield name, routed
    elif isinstance(routed, tuple):
        for number, part in enumerate(routed):
            yield from list_arrays(f"{name}.{number}", part)
    elif is_dataclass(routed):
        for field in fields(routed):
            if "schedule" not in field.name:
                yield from list_arrays(f"{name}.{field.name}", getattr(routed, field.name))


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Return both times at every shape, and what a layer saves."""
    found = []
    checked = [point for point in points.values() if point.get("policy") == POLICIES[0]]
    if checked:
        wrong = [f"{one['rows']} x {one['experts']}: {one['differs']}" for one in checked if one["differs"]]
        found.append(Row("arrays beside routing()'s", "; ".join(wrong) or "equal", "equal", not wrong))
    for experts, count, policy in product(EXPERTS, ROWS, POLICIES):
        point = points.get(point_key(experts, count, policy))
        if point is not None:
            us = point["mode_us"]
            change, error = compare(us[OLD], us[NEW])
            parts = ", ".join(f"{name} {mean(times):.2f}" for name, times in us.items())
            what = f"{count} tokens x {experts} experts, {policy}: {parts} us"
            found.append(Row(what, f"{change:+.2f} ± {error:.2f} us a layer"))
    return found
