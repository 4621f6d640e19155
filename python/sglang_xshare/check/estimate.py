"""What policies would do on a model and a GPU: active experts, kept mass, step time, each with what is assumed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..compatibility.arguments import read_arguments
from ..compatibility.paging import fits
from ..gpus import Gpu
from ..policies.schedule import Schedule, build_schedule
from ..policies.spelling import parse_policy
from ..types import Router
from .loads import ASSUMPTIONS, MOST_ROWS, Drawn, Trace, find_steps, give
from .server import ServerFlags
from .weights import Weights, divide

FIXED = 34e-6
"""Seconds that a MoE layer takes apart from its experts' weights (OEA, H100). Kept as it is on other GPUs."""
REACHED = 0.97
"""Share of the memory's peak at which experts are loaded: 2.9 us for one of Qwen3-30B-A3B's, 9.4 MB (OEA, H100)."""
OTHER = 40e-6
"""Seconds that a layer takes beside that: attention, norms, the host. An H100's servers of Qwen3-30B-A3B took 37 to 54
more us a layer at 4 to 16 requests than all else here comes to, 25 to 27 at one, 67 to 71 at 32 (SGLang 0.5.17).
"""
FORMULA = (
    f"MoE layer = {FIXED * 1e6:.0f} us + active x expert bytes / ({REACHED:.0%} of bandwidth), step = MoE layers x "
    f"that + layers x {OTHER * 1e6:.0f} us + (all other weights + KV cache) / the same; of several ranks the one "
    "that a step waits for"
)
LONGEST = 1.0
"""Seconds of a step beyond which none is told: no server decodes so, and a flag or a key is wrong."""
PCIE_4 = 25.0
"""GB/s from the host's memory over a link of 16 lanes: an assumption, of its peak of 32."""
MOST_CAPTURED = 512
"""Requests of a decode graph beyond which none is looked for."""
DRAFTED = "--speculative-num-draft-tokens N above 1"


@dataclass
class Asked:
    """What is to be compared: `schedules` by their spelling, for `batch` requests of `context` cached tokens each."""

    batch: int
    context: int
    schedules: dict[str, Schedule] = field(default_factory=dict)
    active: tuple[float, float] | None = None
    trace: Trace | None = None

    def count_cached(self, flags: ServerFlags) -> int:
        """Tokens in the KV cache of the rank with most: each data-parallel group holds its own requests'."""
        return self.context * -(-self.batch // flags.dp_size)


def check_asked(asked: Asked, weights: Weights, flags: ServerFlags) -> None:
    """Raise ValueError for active experts that the model cannot have, and for a step that is too large to be drawn."""
    experts, rows = weights.model.num_experts, asked.batch * flags.draft_tokens
    if asked.active is not None or asked.trace is not None:
        flag = "--active" if asked.active is not None else "--trace"
        if len(asked.schedules) > 1:
            many = f"{flag} with {len(asked.schedules)} policies"
            raise ValueError(f"{many}: allowed is the one whose experts they are")
    if asked.trace is not None and flags.ep_size > 1:
        raise ValueError("--trace with --ep-size: it tells no rank's experts; allowed is --active, the fullest's")
    if asked.active is not None:
        whose, most = ("the model's", experts) if flags.ep_size == 1 else ("a rank's", experts // flags.ep_size)
        before, after = asked.active
        if not 1 <= before <= most:
            raise ValueError(f"--active {before:g} {after:g}: allowed is 1 to {whose} {most} experts")
        if not 1 <= after <= before:
            raise ValueError(f"--active {before:g} {after:g}: AFTER {after:g}: allowed is 1 to BEFORE, {before:g}")
    elif asked.trace is None and rows > MOST_ROWS:
        many = f"--batch {asked.batch}: a step of {rows:,} rows"
        raise ValueError(f"{many}: allowed are at most {MOST_ROWS:,} without --active or --trace")


def read_compared(text: str, weights: Weights, asked: Asked, flags: ServerFlags) -> Schedule:
    """A policy of `--compare`. Raises ValueError where it does not run in such a step."""
    try:
        schedule = build_schedule(*parse_policy(text), flags.draft_tokens > 1, DRAFTED, flags.paged)
        if schedule is None or schedule.observed:
            raise ValueError("routes as the model does, with which all are compared; allowed is another policy")
        _check_schedule(schedule, weights, asked, flags)
    except ValueError as error:
        raise ValueError(f"--compare {text}: {error}") from None
    return schedule


def read_served(weights: Weights, asked: Asked, flags: ServerFlags) -> Schedule | None:
    """The policy that the server is to run; None where it routes as the model does. Raises ValueError likewise."""
    drafts = "EAGLE3" if flags.draft_tokens > 1 else None
    given: dict[str, Any] = {"expert_policy": flags.policy, "expert_policy_config": flags.policy_config}
    given |= {"speculative_algorithm": drafts, "enable_paged_experts": flags.paged}
    arguments = read_arguments(SimpleNamespace(**given), DRAFTED)
    schedule = arguments.schedule if arguments else None
    if schedule is None or schedule.observed:
        return None
    try:
        _check_schedule(schedule, weights, asked, flags)
    except ValueError as error:
        raise ValueError(f"--expert-policy {flags.policy}: {error}") from None
    return schedule


def _check_schedule(schedule: Schedule, weights: Weights, asked: Asked, flags: ServerFlags) -> None:
    for plan in schedule.plans(range(weights.model.num_layers)):
        plan.check(Router(top_k=weights.model.top_k), weights.model.num_experts, flags.ep_size)
    rows = asked.batch * flags.draft_tokens
    reason = schedule.reason_to_skip("verify" if flags.draft_tokens > 1 else "decode", rows)
    if reason is not None:
        told = f"--batch {asked.batch}: a step of {rows} rows stays vanilla ({reason})"
        raise ValueError(f"{told}; allowed is one in which it selects")


def find_link(gpu: Gpu | None) -> float:
    """GB/s at which experts come from the host's memory: twice PCIe 4.0's from capability 9.0 on, and on AMD."""
    return PCIE_4 if gpu is None or (gpu.capability or (9, 0)) < (9, 0) else 2 * PCIE_4


def estimate(
    asked: Asked, weights: Weights, flags: ServerFlags, bandwidth: float | None, link: float = PCIE_4
) -> dict[str, Any]:
    """The report. `bandwidth` in GB/s, None where no step time is asked for or none makes sense; `link` likewise, over
    which experts are paged in. Raises ValueError for a trace that does not have the step, and for a step of more than
    `LONGEST`, transfers left out.
    """
    report: dict[str, Any] = {
        "is_estimate": True,
        "formula": FORMULA,
        "bandwidth_gb_per_s": bandwidth,
        "requests": asked.batch,
        "rows": asked.batch * flags.draft_tokens,
        "context": asked.context,
        "policies": {text: schedule.keys for text, schedule in asked.schedules.items()},
        "estimates": [],
    }
    if flags.slots is not None:
        report["link_gb_per_s"] = link
    nobodys = "vanilla" if asked.active is None and asked.trace is None else "as given"
    for text, schedule in asked.schedules.items() or [(nobodys, None)]:
        for source, drawn in _list_loads(asked, text, schedule, weights, flags):
            row = {"is_estimate": True, "policy": text, "source": source}
            report["estimates"].append(row | _describe(drawn, asked, weights, flags, bandwidth, link))
    return report


def _describe(
    drawn: Drawn, asked: Asked, weights: Weights, flags: ServerFlags, bandwidth: float | None, link: float
) -> dict[str, Any]:
    loads = drawn.before, drawn.after
    unknown = asked.active is not None and flags.ep_size > 1
    row: dict[str, Any] = {
        "active_experts": None if unknown else [load.active for load in loads],
        "fullest_rank_experts": [load.fullest for load in loads],
        "kept_mass": drawn.kept_mass,
    }
    page_ins = [load.page_ins for load in loads if load.page_ins is not None]
    transfers = [count * weights.moe_layers * weights.expert / (link * 1e9) for count in page_ins] or [0.0, 0.0]
    if page_ins:
        row |= {"page_ins": page_ins, "transfer_ms": [seconds * 1e3 for seconds in transfers]}
    if bandwidth is None or (flags.paged and not page_ins):
        return row
    cached, rank = asked.count_cached(flags), divide(weights, flags)
    steps = [estimate_step(rank, load.fullest, cached, bandwidth * 1e9) for load in loads]
    if steps[0][1] > LONGEST:
        beyond = f"{bandwidth:,g} GB/s: a step of {steps[0][1]:,.0f} s; allowed are {LONGEST:g} s at most"
        raise ValueError(f"--batch {asked.batch}, --context {asked.context} at {beyond}")
    before, after = (step + more for (_, step), more in zip(steps, transfers, strict=True))
    return row | {
        "moe_layer_us": [layer * 1e6 for layer, _ in steps],
        "step_ms": [before * 1e3, after * 1e3],
        "tokens_per_s": [asked.batch / before, asked.batch / after],
        "speedup": before / after,
    }


def count_captured(schedule: Schedule, weights: Weights, slots: int) -> int:
    """The most requests of a decode graph: up to the first whose step might need more experts than there are slots."""
    top_k, num_experts = weights.model.top_k, weights.model.num_experts
    sizes = range(1, MOST_CAPTURED + 1)
    return next((size - 1 for size in sizes if not fits(schedule, size, top_k, num_experts, slots)), MOST_CAPTURED)


def estimate_step(weights: Weights, experts: float, cached: float, bandwidth: float) -> tuple[float, float]:
    """Seconds of (a MoE layer, a decode step) in which a GPU loads so many `experts` a layer, and `cached` tokens of KV
    cache. `bandwidth` is its memory's peak in bytes/s. On several ranks it is the rank that the step waits for.

    Exchanges between ranks are not in it, sampling and the selection itself have no term of their own; nothing hides
    behind anything else.
    """
    reached = REACHED * bandwidth
    layer = FIXED + experts * weights.expert / reached
    rest = weights.model.num_layers * OTHER + (weights.dense + cached * weights.cache) / reached
    return layer, weights.moe_layers * layer + rest


def _list_loads(
    asked: Asked, text: str, schedule: Schedule | None, weights: Weights, flags: ServerFlags
) -> Iterator[tuple[str, Drawn]]:
    """(where they come from, active experts before and after): by assumption where nobody knows them."""
    rows = asked.batch * flags.draft_tokens
    if asked.trace is not None:
        drawn, is_policys = find_steps(asked.trace, rows, text if schedule else None)
        yield f"trace {asked.trace.file}{'' if is_policys else ', as its server kept, whatever policy is named'}", drawn
    elif asked.active is not None:
        yield "as given", give(*asked.active)
    else:
        from .active import draw_loads

        for name, common in ASSUMPTIONS.items():
            yield (
                f"assumed: {name}",
                draw_loads(schedule, weights.model, rows, flags.draft_tokens, common, flags.ep_size, flags.slots),
            )
