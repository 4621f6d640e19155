"""The server flags of EAGLE-3."""

from pathlib import Path

from benchmark.serving.server import has_gpu


def eagle3_flags(draft: Path, steps: int = 3, topk: int = 1, draft_tokens: int = 4) -> tuple[str, ...]:
    """Flags that speculate with `draft`: `steps` levels, `topk` branches, `draft_tokens` verified a request."""
    # Without a GPU only this attention backend masks a draft tree, and SGLang has to be told for both phases.
    backends = (
        () if has_gpu() else ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
    )
    return (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(draft_tokens), *backends),
    )
