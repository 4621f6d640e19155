"""SGLang's CUDA graphs of decode and verify steps: when it captures them, of which sizes, and how to do it again."""

from typing import Any


def is_capturing() -> bool:
    """Whether SGLang is about to capture graphs: eager steps come before each capture."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def list_sizes(model_runner: Any, config: Any) -> list[int]:
    """Return the requests, ascending, that SGLang captures graphs for, once its request pool has a size."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(model_runner, config.speculative_num_draft_tokens or 1)
    return list(sizes)


def capture_anew(model_runner: Any) -> None:
    """Capture the graphs of the target's decode or verify steps again. Raises what SGLang does, such as for memory."""
    model_runner.init_decode_cuda_graph()
