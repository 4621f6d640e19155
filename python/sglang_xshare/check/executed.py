"""Parts of configurations that have never run on a GPU, and the error of the estimate in measured steps.

A test compares both tables with the benchmark records.
"""

from dataclasses import dataclass
from typing import Any

from .server import ServerFlags

RELEASES_ON_GPU = ("0.5.17", "0.5.23")
"""Releases of SGLang that have served a policy on a GPU."""
GPUS_SERVED = ("h100", "h200")
ALONE = "data-parallel attention: while one rank prefills, the step is vanilla on all ranks"


@dataclass(frozen=True)
class Miss:
    """The error of the estimate for one model class, in a number of measured steps. Errors are ranges (least, most).

    `time` is the estimated time divided by the measured time. `speedup` is the estimated speed-up minus the measured
    speed-up.
    """

    model: str
    steps: int
    time: tuple[float, float]
    speedup: tuple[float, float]


MISSES = {
    "Qwen3MoeForCausalLM": Miss("Qwen3-30B-A3B in bf16", 28, (0.85, 1.17), (-0.02, 0.08)),
    "GptOssForCausalLM": Miss("gpt-oss-20b and gpt-oss-120b in mxfp4", 14, (0.52, 0.72), (-0.09, 0.06)),
}
"""The errors for each model class. The measured steps ran with and without a policy, on an H100 and on H200s."""


def list_never_executed(flags: ServerFlags, architecture: str, report: dict[str, Any]) -> list[str]:
    """Return the parts of a server's configuration that have never run on a GPU. Return [] for a server on a CPU."""
    if report["gpu"] is None and report.get("device") != "cuda":
        return []
    runner, release = str(report.get("moe_runner")), report["sglang"]
    found = {
        "several GPUs": flags.ranks * flags.stages > 1,
        f"--moe-a2a-backend {flags.moe_a2a_backend}": flags.moe_a2a_backend != "none",
        f"MoE runner {runner}": runner.startswith("flashinfer"),
        f"SGLang {release} on a GPU (executed: {', '.join(RELEASES_ON_GPU)})": release
        and release not in RELEASES_ON_GPU,
        f"a GPU of this kind ({report['gpu']})": report["gpu"] not in (None, *GPUS_SERVED),
        "this model family on a GPU": architecture not in MISSES,
    }
    return [what for what, applies in found.items() if applies]


def describe_miss(architecture: str) -> str:
    """Return a sentence about the error of the estimate for this model family."""
    miss = MISSES.get(architecture)
    if miss is None:
        return "No step of this model family was measured on a GPU: the error of this estimate is unknown."
    (shortest, longest), (low, high) = miss.time, miss.speedup
    releases = " and ".join(RELEASES_ON_GPU)
    return (
        f"{miss.steps} measured steps of {miss.model}: the estimated time was {shortest:g} to {longest:g} times the "
        f"measured one, the estimated speed-up {-low:g} below to {high:g} above it (SGLang {releases}, one GPU)."
    )
