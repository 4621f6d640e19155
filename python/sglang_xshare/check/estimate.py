"""An estimate of what policies gain: the active experts, the kept mass, and the time of a decode step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..compatibility.arguments import join_keys
from ..policies.description import describe_keys
from ..policies.schedule import Schedule, build_schedule
from ..types import Router
from .executed import describe_miss
from .server import ServerFlags
from .weights import Weights, divide

FIXED = 34e-6
"""The seconds that an MoE layer takes, apart from reading the weights of experts.

The OEA paper measured this time on an H100. The estimate uses it for all GPUs.
"""
REACHED = 0.97
"""The share of the peak memory bandwidth that a GPU reaches when it reads weights.

The OEA paper measured on an H100 that reading an expert of Qwen3-30B-A3B takes 2.9 us. Such an expert has 9.4 MB.
"""
OTHER = 40e-6
"""The seconds that a layer takes for all other work: attention, norms, and the host.

The value comes from steps of Qwen3-30B-A3B that were measured on an H100 with SGLang 0.5.17. The measured time of a
layer was longer than the estimate without `OTHER`. The difference was:

- 25 to 27 us with 1 request
- 37 to 54 us with 4 to 16 requests
- 67 to 71 us with 32 requests
"""
FORMULA = (
    f"MoE layer = {FIXED * 1e6:.0f} us + active x expert bytes / ({REACHED:.0%} of bandwidth), step = MoE layers x "
    f"that + layers x {OTHER * 1e6:.0f} us + (all other weights + KV cache) / the same bandwidth; with several ranks, "
    "the numbers of the slowest rank"
)
COMMON = 0.47
"""The share of the logits' variance that all rows have in common.

With this share 49 of 128 experts are active at 16 rows, as in the OEA paper's measurement of Qwen3-30B-A3B.
"""
ASSUMPTIONS = {"agreeing": COMMON, "independent": 0.0}
MOST_ROWS = 16_384
"""The largest number of rows for which random logits are drawn.

With so many rows and 256 experts, the logits take 0.6 GB, and each layer takes 2.6 s on one CPU core.
"""
DRAFTED = "--speculative-num-draft-tokens N above 1"


@dataclass(frozen=True)
class Step:
    """A decode step of a server with `batch` requests. Each request has `context` cached tokens.

    `active` contains the measured numbers of active experts, without and with the policy. None means that the numbers
    are unknown.
    """

    weights: Weights
    flags: ServerFlags
    batch: int
    context: int
    active: tuple[float, float] | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows that the router gets. Each draft token of a request is one row."""
        return self.batch * self.flags.draft_tokens

    @property
    def cached(self) -> int:
        """Return the number of tokens in the KV cache of the rank with the most requests.

        Each data-parallel group caches only its own requests.
        """
        return self.context * -(-self.batch // self.flags.dp_size)

    def check(self, num_policies: int) -> None:
        """Raise ValueError if `active` is impossible or is set with several policies, or if there are too many rows."""
        experts, ep_size = self.weights.model.num_experts, self.flags.ep_size
        if self.active is None:
            if self.rows > MOST_ROWS:
                many = f"--batch {self.batch}: a step of {self.rows:,} rows"
                raise ValueError(f"{many}: must be at most {MOST_ROWS:,} rows without --active")
            return
        if num_policies > 1:
            raise ValueError(f"--active with {num_policies} policies: must be used with one: AFTER counts its experts")
        whose, most = ("the model's", experts) if ep_size == 1 else ("a rank's", experts // ep_size)
        before, after = self.active
        if not 1 <= before <= most:
            raise ValueError(f"--active {before:g} {after:g}: BEFORE {before:g}: must be 1 to {whose} {most} experts")
        if not 1 <= after <= before:
            raise ValueError(f"--active {before:g} {after:g}: AFTER {after:g}: must be 1 to BEFORE, {before:g}")

    def read_policy(self, flag: str, text: str, keys: dict[str, Any]) -> Schedule | None:
        """Return the schedule of a policy. Return None if the policy routes as the model does.

        `text` is the value of `flag`, and `keys` contains further keys. Raises ValueError if the policy is wrong, or if
        it does not act in this step.
        """
        drafts, model = self.flags.draft_tokens > 1, self.weights.model
        try:
            schedule = build_schedule(*join_keys(text, keys), drafts, DRAFTED)
            if schedule is None or schedule.observed:
                return None
            for plan in schedule.plans(range(model.num_layers)):
                plan.check(Router(model.top_k, renormalize=model.renormalize), model.num_experts, self.flags.ep_size)
            reason = schedule.reason_to_skip("verify" if drafts else "decode", self.rows)
            if reason is not None:
                told = f"--batch {self.batch}: a step of {self.rows} rows stays vanilla ({reason})"
                raise ValueError(f"{told}; must be a step in which the policy selects")
        except ValueError as error:
            raise ValueError(f"{flag} {text}: {error}") from None
        return schedule


def estimate(step: Step, schedules: dict[str, Schedule], bandwidth: float | None) -> dict[str, Any]:
    """Return the report on the gain from policies.

    `schedules` contains the schedule of each policy. Its keys are the policies as the user wrote them. `bandwidth` is
    in GB/s. If it is None, the report contains no times.
    """
    report: dict[str, Any] = {
        "is_estimate": True,
        "formula": FORMULA,
        "missed": describe_miss(step.weights.model.architecture),
        "bandwidth_gb_per_s": bandwidth,
        "requests": step.batch,
        "rows": step.rows,
        "context": step.context,
        "policies": {text: describe_keys(schedule) for text, schedule in schedules.items()},
        "estimates": [],
    }
    for text, schedule in schedules.items() or [("vanilla" if step.active is None else "as given", None)]:
        for source, loads in _list_loads(step, schedule):
            row = {"is_estimate": True, "policy": text, "source": source, **loads}
            if bandwidth is not None:
                row |= _describe_step(loads["fullest_rank_experts"], step, bandwidth)
            report["estimates"].append(row)
    return report


def _list_loads(step: Step, schedule: Schedule | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the numbers of active experts, without and with the policy, and the kept mass.

    Each result begins with the source of its numbers. The source is --active if the user has set this flag. Otherwise
    the numbers are computed from random logits, once for each of `ASSUMPTIONS`.
    """
    ep_size = step.flags.ep_size
    if step.active is not None:
        active = list(step.active)
        known = active if ep_size == 1 else None
        yield "as given", {"active_experts": known, "fullest_rank_experts": active, "kept_mass": None}
        return
    from .active import draw_loads

    for name, common in ASSUMPTIONS.items():
        loads = draw_loads(schedule, step.weights.model, step.rows, step.flags.draft_tokens, common, ep_size)
        yield f"assumed: {name}", loads


def _describe_step(experts: list[float], step: Step, bandwidth: float) -> dict[str, Any]:
    rank = divide(step.weights, step.flags)
    layers, steps = zip(*(estimate_step(rank, count, step.cached, bandwidth * 1e9) for count in experts), strict=True)
    return {
        "moe_layer_us": [seconds * 1e6 for seconds in layers],
        "step_ms": [seconds * 1e3 for seconds in steps],
        "tokens_per_s": [step.batch / seconds for seconds in steps],
        "speedup": steps[0] / steps[1],
    }


def estimate_step(weights: Weights, experts: float, cached: float, bandwidth: float) -> tuple[float, float]:
    """Return the seconds that an MoE layer and a decode step take on the GPU of the slowest rank.

    The GPU reads the weights of `experts` experts in each layer. It also reads the KV cache of `cached` tokens.
    `bandwidth` is the GPU's peak memory bandwidth in bytes/s. The estimate omits communication between ranks, sampling
    and the selection. It assumes that no operations overlap.
    """
    reached = REACHED * bandwidth
    layer = FIXED + experts * weights.expert / reached
    rest = weights.model.num_layers * OTHER + (weights.dense + cached * weights.cache) / reached
    return layer, weights.moe_layers * layer + rest
