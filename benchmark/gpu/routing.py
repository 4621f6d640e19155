"""Experiment `routing`: the launches of gpt-oss's layers between logits and matmul, with `routing()` or our arrays.

Under `triton_kernel` a layer masks the logits and upstream's `routing()` derives its arrays in nine launches. With
prebuilt arrays the selection returns ids, and one launch builds the arrays. The two ways are compared, array by array
and by the output of a small layer, then timed in turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from math import inf, isnan
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
"""Experts and rows."""
TOP_K = 4
POLICIES = ("xshare:k0=4", "xshare:k0=0,add=24")
"""The first drops nothing: the arrays of both ways must be equal."""
LAYERS, ROUNDS = 36, 10
"""Copies in a graph, which make the graph's own launch a small part."""
OLD, NEW = "mask and routing()", "select and arrays"
WIDTH = 64
"""Columns of the small layer's input and output."""
LAYER_ERROR = 2**-7
"""Bar for the layers' difference, as a share of the largest output: gates are rounded to bf16."""


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what measures each point, by key."""
    shapes = [(int(experts), rows, policy) for experts, rows, policy in product(parts, ROWS, POLICIES)]
    return {point_key(*shape): partial(_time, *shape) for shape in shapes}


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Time every point that the record lacks. Return the first failure."""
    return measure_points(record, list_points(parts))


def point_key(experts: int, rows: int, policy: str) -> str:
    """Return a point's key in the record."""
    return f"{rows}x{experts}/{policy}"


def make_calls(experts: int, rows: int, policy: str) -> dict[str, Callable[[], Any]]:
    """Return what is timed at a shape, by name. Raises RuntimeError if triton_kernels takes no arrays of ours."""
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
    old, new = calls[OLD](), calls[NEW]()
    differs = find_differences(old, new) if policy == POLICIES[0] else None
    error = compare_layers(old, new, rows, experts)
    us = time_alternating({name: partial(repeat, call, LAYERS) for name, call in calls.items()}, ROUNDS, LAYERS)
    print(f"{rows} x {experts}, {policy}: {spell_times(us)}", flush=True)
    shape = {"experts": experts, "rows": rows, "policy": policy}
    return {**shape, "mode_us": us, "differs": differs, "layer_error": error}


def find_differences(old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """Return the names of all arrays that differ; gates may differ by a rounding to bf16."""
    expected, found = (dict(list_arrays("routing", tuple(routed))) for routed in (old, new))
    return [name for name in expected | found if not _agree(expected.get(name), found.get(name))]


def _agree(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None or expected.numel() != found.numel():
        return False
    if expected.is_floating_point():
        return torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=2**-12)
    return torch.equal(found.flatten().int(), expected.flatten().int())


def list_arrays(name: str, routed: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of what matmul reads: tuples and records of any depth.

    A schedule is cut behind the last block: matmul does not read the rest, whose length differs.
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


def compare_layers(old: Sequence[Any], new: Sequence[Any], rows: int, experts: int) -> float:
    """Return how far the outputs of a small layer differ, as a share of the largest output: infinite for a NaN."""
    generator = torch.Generator().manual_seed(experts)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weights = torch.randn(experts, WIDTH, WIDTH, generator=generator)
    expected, found = compute_layer(old, hidden, weights), compute_layer(new, hidden, weights)
    error = float((found - expected).abs().max() / expected.abs().max())
    return inf if isnan(error) else error


def compute_layer(routed: Sequence[Any], hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [n, o] float32 as the runner computes it of `hidden` [n, d] and `weights` [N, d, o], both on the CPU.

    `routed` is a `TritonKernelTopKOutput`, or what `routing()` returns. Each expert multiplies the rows at its sorted
    places, a gate scales each product, and an index scatters the products to the slots of the rows, which are summed
    up. A slot that no place writes is NaN, except in 0.5.17, whose runner skips slots without an expert.
    """
    if len(routed) == 3:  # 0.5.17
        data, gather, scatter = routed
        counts, gates, by_expert, top_k = data.expt_hist, data.gate_scal, scatter.dst_indx, data.n_expts_act
        pairs, unwritten = gather.src_indx, 0.0
        rows = pairs // top_k
    else:
        metadata, rows, by_expert, gates, top_k = routed
        counts, unwritten = metadata.slice_sizes, torch.nan
    counts, rows, by_expert = (array.flatten().cpu().long() for array in (counts, rows, by_expert))
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    places = len(expert)
    products = torch.einsum("pd,pdo->po", hidden[rows[:places]], weights[expert])
    slots = torch.full((len(by_expert), weights.shape[2]), unwritten)
    slots[by_expert[:places]] = products * gates.flatten().cpu().float()[:places, None]
    return slots.view(len(hidden), top_k, -1).sum(1)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield how far both ways agree, both times at every shape, and what a layer saves."""
    checked = [point for point in points.values() if point.get("policy") == POLICIES[0]]
    if checked:
        wrong = [f"{one['rows']} x {one['experts']}: {_join(one['differs'])}" for one in checked if one["differs"]]
        yield Row("arrays beside routing()'s", "; ".join(wrong) or "equal", "equal", not wrong)
    errors = [point["layer_error"] for point in points.values() if "layer_error" in point]
    if errors:
        bar = f"at most {LAYER_ERROR:.2%} of the largest"
        yield Row("layer's output beside routing()'s", f"{max(errors):.2%}", bar, max(errors) <= LAYER_ERROR)
    for experts, count, policy in product(PARTS, ROWS, POLICIES):
        point = points.get(point_key(int(experts), count, policy))
        if point is not None:
            us = point["mode_us"]
            what = f"{count} tokens x {experts} experts, {policy}: {spell_times(us)}"
            yield Row(what, f"{spell_change(us[OLD], us[NEW])} us a layer")


def _join(differs: str | Sequence[str]) -> str:
    """Return the names of arrays in one line; the records of 2026-11-27 have the first name alone."""
    return differs if isinstance(differs, str) else ", ".join(differs)
