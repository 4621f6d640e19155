"""Experiment `routing`: what gpt-oss's layers launch between logits and matmul, with `routing()` and with our arrays.

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

from benchmark.common.record import Record
from benchmark.gpu.checks import choose_parts, measure_points
from benchmark.gpu.levers import compare, spell_times
from benchmark.gpu.table import Row

EXPERTS, ROWS = (128, 32), (16, 8, 32, 4, 1)
TOP_K = 4
POLICIES = ("xshare:k0=4", "xshare:k0=0,add=24")
"""The first drops nothing: the arrays of both ways must be equal."""
LAYERS, ROUNDS = 36, 10
"""Copies in a graph, so that its own launch is a small part."""
OLD, NEW = "mask and routing()", "select and arrays"
WIDTH = 64
"""Columns of the small layer's input and output."""
LAYER_ERROR = 2**-7
"""Bar for the layers' difference, as a share of the largest output: gates are rounded to bf16."""


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
    """Return what is timed at a shape, by name. Raises RuntimeError if triton_kernels takes no arrays of ours."""
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
    """Compile what is timed at a shape into Triton's cache."""
    for call in make_calls(experts, rows, policy).values():
        call()


def _time(experts: int, rows: int, policy: str) -> dict[str, Any]:
    from benchmark.gpu.timing import repeat, time_alternating

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
    import torch

    found, expected = (dict(list_arrays("routing", tuple(routed))) for routed in (new, old))
    differing = []
    for name in expected | found:
        if name not in found or name not in expected or found[name].numel() != expected[name].numel():
            same = False
        elif expected[name].is_floating_point():
            same = torch.allclose(found[name].float(), expected[name].float(), rtol=2**-7, atol=2**-12)
        else:
            same = torch.equal(found[name].flatten().int(), expected[name].flatten().int())
        if not same:
            differing.append(name)
    return differing


def list_arrays(name: str, routed: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor) of what matmul reads: tuples and records of any depth.

    A schedule is cut behind the last block: matmul does not read the rest, whose length differs.
    """
    if hasattr(routed, "is_floating_point"):
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
    import torch

    generator = torch.Generator().manual_seed(experts)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weights = torch.randn(experts, WIDTH, WIDTH, generator=generator)
    expected, found = compute_layer(old, hidden, weights), compute_layer(new, hidden, weights)
    error = float((found - expected).abs().max() / expected.abs().max())
    return inf if isnan(error) else error


def compute_layer(routed: Sequence[Any], hidden: Any, weights: Any) -> Any:
    """Return [n, o] float32 as the runner computes it of `hidden` [n, d] and `weights` [N, d, o], both on the CPU.

    `routed` is a `TritonKernelTopKOutput`, or what `routing()` returns. Each expert multiplies the rows at its sorted
    places, a gate scales each product, and an index scatters the products to the slots of the rows, which are summed
    up. A slot that no place writes is NaN, except in 0.5.17, whose runner leaves out the slots without an expert.
    """
    import torch

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


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Return how far both ways agree, both times at every shape, and what a layer saves."""
    found = []
    checked = [point for point in points.values() if point.get("policy") == POLICIES[0]]
    if checked:
        wrong = [f"{one['rows']} x {one['experts']}: {_join(one['differs'])}" for one in checked if one["differs"]]
        found.append(Row("arrays beside routing()'s", "; ".join(wrong) or "equal", "equal", not wrong))
    errors = [point["layer_error"] for point in points.values() if "layer_error" in point]
    if errors:
        bar = f"at most {LAYER_ERROR:.2%} of the largest"
        found.append(Row("layer's output beside routing()'s", f"{max(errors):.2%}", bar, max(errors) <= LAYER_ERROR))
    for experts, count, policy in product(EXPERTS, ROWS, POLICIES):
        point = points.get(point_key(experts, count, policy))
        if point is not None:
            us = point["mode_us"]
            change, error = compare(us[OLD], us[NEW])
            what = f"{count} tokens x {experts} experts, {policy}: {spell_times(us)}"
            found.append(Row(what, f"{change:+.2f} ± {error:.2f} us a layer"))
    return found


def _join(differs: str | Sequence[str]) -> str:
    """Return the names of arrays in one line; the records of 2026-11-27 have the first name alone."""
    return differs if isinstance(differs, str) else ", ".join(differs)
