"""SGLang's CUDA graphs of decode and verify steps: their batch sizes and their capture."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from .batches import list_captured


def is_capturing() -> bool:
    """Return whether SGLang is capturing graphs. This includes the eager steps before each capture."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def list_sizes(model_runner: Any, config: Any) -> list[int]:
    """Return the numbers of requests for which SGLang captures graphs, in ascending order.

    SGLang's request pool must exist.
    """
    if not list_captured(config):
        return []
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(model_runner, config.speculative_num_draft_tokens or 1)
    return list(sizes)


def check_memory(scheduler: Any) -> None:
    """Raise ValueError if a capture would use memory that was released with POST /release_memory_occupation."""
    if scheduler.weight_updater.offload_tags:
        reason = "memory must be resumed first (POST /resume_memory_occupation)"
        raise ValueError(f"CUDA graphs would have to be captured again: {reason}")


def capture_again(model_runner: Any, scheduler: Any, fits: Callable[[int], bool] | None = None) -> None:
    """Capture the graphs of the target model's decode or verify steps again.

    Raises SGLang's errors, for example if memory is missing. `scheduler` is SGLang's scheduler, which contains the
    draft worker. `fits` is for a server that pages experts. It returns whether the active experts of a number of
    requests fit the page slots at once. SGLang refuses a capture that does not fit, because a graph cannot load experts
    in several parts. So `find_cap` limits the captured sizes, as at the start of a server.
    """
    if fits is None:
        _capture_widths(model_runner, scheduler)
        return
    from sglang.srt.runtime_context import get_exec

    decode = get_exec().graph.cuda_graph_config.decode
    sizes = decode.bs
    try:
        cap = find_cap(sizes, fits)
        decode.bs = sorted({size for size in sizes if size < cap} | {cap})
        _capture_widths(model_runner, scheduler)
    finally:
        decode.bs = sizes


def find_cap(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest number n for which all batches of 1 to n requests fit.

    The result is at least 1 and at most max(`sizes`).
    """
    return max(takewhile(fits, range(1, max(sizes) + 1)), default=1)


def _capture_widths(model_runner: Any, scheduler: Any) -> None:
    """Capture the target model's graphs for each draft width. If this fails, no width has graphs.

    There are several widths if the draft depth adapts.
    """
    worker: Any = getattr(scheduler, "draft_worker", None)
    controller: Any = getattr(worker, "adaptive_controller", None)
    if controller is None:
        model_runner.init_decode_cuda_graph()
        return
    states, current = controller._states, worker.speculative_num_steps
    for state in states.values():  # free the memory of all graphs before the first capture
        state.target_graph_runner = None
    captured = {}
    try:
        # The current width is last, so it is active afterwards. Draft models do not select, so they keep their graphs.
        for steps in sorted(states, key=lambda steps: steps == current):
            worker.apply_runtime_state(states[steps])
            model_runner.init_decode_cuda_graph()
            captured[steps] = model_runner.decode_cuda_graph_runner
    finally:
        worker.apply_runtime_state(states[current])
    for steps, runner in captured.items():
        states[steps].target_graph_runner = runner
