"""Server flags for speculative decoding with a draft model."""

from pathlib import Path

from benchmark.common.server import has_gpu
from benchmark.common.variant import Variant

DRAFTING = "EAGLE-3, "
"""The prefix in the names of variants with speculative decoding."""


def speculative_flags(
    draft: str | Path, topk: int = 1, steps: int = 3, draft_tokens: int = 4, algorithm: str = "EAGLE3"
) -> tuple[str, ...]:
    """Return the server flags for speculative decoding with the draft model `draft`.

    `topk` is the number of branches and `steps` the number of levels of the draft tree. `draft_tokens` is the number of
    tokens that a verify step checks per request.
    """
    # The only choice of attention backends that all releases support on a CPU without AMX: see sgl-kernel/README.md.
    on_cpu = ("--prefill-attention-backend", "intel_amx", "--speculative-draft-attention-backend", "intel_amx")
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-steps", str(steps)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
        *(() if has_gpu() else on_cpu),
    )


def drafting_variant(variant: Variant, flags: tuple[str, ...]) -> Variant:
    """Return the same variant with speculative decoding. `flags` is a result of `speculative_flags`."""
    # SGLang updates the accepted length with each decode log line, by default every 40 steps. A short run would end
    # before the first line.
    return Variant(f"{DRAFTING}{variant.name}", variant.policy, variant.keys, (*flags, "--decode-log-interval", "8"))
