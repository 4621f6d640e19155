"""What a server would page in where a GPU holds some experts of each layer: an estimate, from drawn logits."""

from __future__ import annotations

from typing import Any

from ..compatibility.paging import fits
from ..gpus import Gpu
from ..policies.schedule import Schedule
from .estimate import Asked, estimate_step
from .flags import ServerFlags
from .loads import ASSUMPTIONS
from .weights import Weights

LINK = 25.0
"""GB/s from the host's memory where nobody says: a PCIe 4.0 link of 16 lanes, of which 32 are its peak."""
LAYERS, STEPS, COLD = 4, 48, 8
"""Layers that are drawn, and steps of each, the first of which fill the slots and do not count."""
MOST_CAPTURED = 512
"""Requests of a decode graph beyond which none is looked for."""


def describe_paging(
    asked: Asked, weights: Weights, flags: ServerFlags, gpu: Gpu | None, bandwidth: float | None
) -> dict[str, Any]:
    """Of `asked.slots` experts a layer: how far decode graphs are captured, the GPU's bytes, and for each policy what
    it pages in a layer and step, the time of these transfers over `asked.link`, and with a `bandwidth` in GB/s of the
    GPU's memory that of the step, before and after; nothing hides behind anything else. Raises ValueError
    for slots that are none.
    """
    slots, model = asked.slots, weights.model
    assert slots is not None
    if not model.top_k <= slots <= model.num_experts:
        raise ValueError(
            f"--resident {slots}: allowed is the model's top-k, {model.top_k}, to {model.num_experts} experts"
        )
    held = weights.moe_layers * slots * weights.expert + weights.held
    report: dict[str, Any] = {
        "is_estimate": True,
        "slots": slots,
        "link_gb_per_s": asked.link,
        "gpu_bytes": held,
        "fits": None if gpu is None else held < gpu.memory_bytes * (flags.fraction or 1),
        "captured": {"without a policy": max(1, slots // model.top_k)},
        "policies": [],
    }
    for text, schedule in asked.schedules.items():
        report["captured"][text] = count_captured(schedule, model.top_k, model.num_experts, slots)
        for source, common in ASSUMPTIONS.items():
            drawn = _draw(schedule, weights, asked.batch, slots, common)
            transfer = [count * weights.moe_layers * weights.expert / asked.link / 1e6 for count in drawn["page_ins"]]
            row = {"policy": text, "source": f"assumed: {source}", **drawn, "transfer_ms": transfer}
            if bandwidth is not None:
                cached = asked.count_cached(flags)
                steps = [estimate_step(weights, count, cached, bandwidth * 1e9)[1] for count in drawn["active"]]
                row["step_ms"] = [1e3 * step + more for step, more in zip(steps, transfer, strict=True)]
            report["policies"].append(row)
    return report


def count_captured(schedule: Schedule, top_k: int, num_experts: int, slots: int) -> int:
    """The most requests of a decode graph: up to the first whose step might need more experts than there are slots."""
    sizes = range(1, MOST_CAPTURED + 1)
    return next((size - 1 for size in sizes if not fits(schedule, size, top_k, num_experts, slots)), MOST_CAPTURED)


def _draw(schedule: Schedule, weights: Weights, rows: int, slots: int, common: float) -> dict[str, Any]:
    """`page_ins` and `active` experts a layer and step of the model itself and of the policy, each from its own slots,
    and the policy's `kept_mass`. A layer's steps share what its rows have in common; the rest is drawn for each step.
    """
    import torch

    from ..policies import VANILLA
    from ..selection import select
    from ..types import Batch, Router

    model = weights.model
    router = Router(top_k=model.top_k, scoring=model.scoring)
    generator = torch.Generator().manual_seed(0)
    counts: list[list[float]] = []
    for layer in range(LAYERS):
        plan = schedule.plan(layer * model.num_layers // LAYERS, rows) or VANILLA
        shared = torch.randn(1, model.num_experts, generator=generator)
        last = [-torch.arange(model.num_experts, dtype=torch.float64) for _ in range(2)]
        for step in range(1, STEPS + 1):
            own = torch.randn(rows, model.num_experts, generator=generator)
            logits = common**0.5 * shared + (1 - common) ** 0.5 * own
            seen: list[float] = []
            for used, one in zip(last, (VANILLA, plan), strict=True):
                resident = torch.zeros(model.num_experts, dtype=torch.bool)
                resident[used.topk(slots).indices] = True
                out = select(logits, one, router, Batch(resident=resident, slots=slots), backend="torch")
                seen += [float((out.active & ~resident).sum()), float(out.active.sum()), float(out.kept_mass.mean())]
                used[out.active] = step  # what was loaded already goes through the layer first
                used[out.active & ~resident] += 0.5
            if step > COLD:
                counts.append(seen)
    page_ins, active, _, own_page_ins, own_active, kept = torch.tensor(counts).mean(0).tolist()
    return {"page_ins": [page_ins, own_page_ins], "active": [active, own_active], "kept_mass": kept}
