"""SGLang's CUDA graphs of decode and verify steps: whether a capture runs, its sizes, and another capture."""

from typing import Any


def is_capturing() -> bool:
    """Return whether SGLang captures graphs now. The eager steps before each capture belong to it."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def list_sizes(model_runner: Any, config: Any) -> list[int]:
    """Return the numbers of requests, ascending, that SGLang captures graphs for. SGLang's request pool must exist."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(model_runner, config.speculative_num_draft_tokens or 1)
    return list(sizes)


def capture_anew(model_runner: Any) -> None:
    """Capture the graphs of the target's decode or verify steps again. Raises SGLang's own errors, as for memory."""
    model_runner.init_decode_cuda_graph()
