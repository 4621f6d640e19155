"""SGLang's CUDA graphs of decode and verify steps: a running capture, the captured sizes, and a new capture."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from .batches import list_captured


def is_capturing() -> bool:
    """Return whether SGLang captures graphs now, including the eager steps before each capture."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def list_sizes(model_runner: Any, config: Any) -> list[int]:
    """Return the numbers of requests that SGLang captures graphs for, ascending. SGLang's request pool must exist."""
    if not list_captured(config):
        return []
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    sizes, _ = get_batch_sizes_to_capture(model_runner, config.speculative_num_draft_tokens or 1)
    return list(sizes)


def check_memory(scheduler: Any) -> None:
    """Raise ValueError if a capture would use memory that POST /release_memory_occupation has released."""
    if scheduler.weight_updater.offload_tags:
        reason = "memory must be resumed first (POST /resume_memory_occupation)"
        raise ValueError(f"CUDA graphs would have to be captured again: {reason}")


def capture_again(model_runner: Any, scheduler: Any, fits: Callable[[int], bool] | None = None) -> None:
    """Capture the graphs of the target's decode or verify steps again. Raises SGLang's errors, as for missing memory.

    `scheduler` is SGLang's scheduler, which has the draft worker. `fits`, for a server that pages experts, returns
    whether the active experts of a number of requests fit the slots at once. If not, SGLang refuses the capture,
    because a graph cannot load one part of the experts after another. The largest captured size is then that of
    `find_cap`, as at the start of a server.
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
    """Return the largest n, at most max(`sizes`), such that every number of requests from 1 to n fits; at least 1."""
    return max(takewhile(fits, range(1, max(sizes) + 1)), default=1)


def _capture_widths(model_runner: Any, scheduler: Any) -> None:
    """Capture the target's graphs of each draft width (several if the depth adapts). After a failure none has any."""
    worker: Any = getattr(scheduler, "draft_worker", None)
    controller: Any = getattr(worker, "adaptive_controller", None)
    if controller is None:
        model_runner.init_decode_cuda_graph()
        return
    states, current = controller._states, worker.speculative_num_steps
    for state in states.values():  # frees the memory of all graphs before the first capture
        state.target_graph_runner = None
    captured = {}
    try:
        # The current width is last, so its state is active afterwards. Drafts do not select, so their graphs stay.
        for steps in sorted(states, key=lambda steps: steps == current):
            worker.apply_runtime_state(states[steps])
            model_runner.init_decode_cuda_graph()
            captured[steps] = model_runner.decode_cuda_graph_runner
    finally:
        worker.apply_runtime_state(states[current])
    for steps, runner in captured.items():
        states[steps].target_graph_runner = runner
