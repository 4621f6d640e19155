"""Speculative decoding with a draft model: its server flags, and the variants that have them."""

from pathlib import Path

from benchmark.common.server import has_gpu
from benchmark.common.variant import Variant

DRAFTING = "EAGLE-3, "
"""The prefix of the name of a variant with drafts."""


def speculative_flags(
    draft: str | Path, topk: int = 1, steps: int = 3, draft_tokens: int = 4, algorithm: str = "EAGLE3"
) -> tuple[str, ...]:
    """Return the flags of `draft`: `topk` branches, `steps` levels, `draft_tokens` verified a request."""
    # The only split that all releases honour on a processor without AMX: sgl-kernel/README.md.
    on_cpu = ("--prefill-attention-backend", "intel_amx", "--speculative-draft-attention-backend", "intel_amx")
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-steps", str(steps)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
        *(() if has_gpu() else on_cpu),
    )


def drafting_variant(variant: Variant, flags: tuple[str, ...]) -> Variant:
    """Return the variant with drafts, by the flags of `speculative_flags`."""
    # The decode log updates the accepted length, by default every 40 steps: a short run has no line.
    return Variant(f"{DRAFTING}{variant.name}", variant.policy, variant.keys, (*flags, "--decode-log-interval", "8"))
