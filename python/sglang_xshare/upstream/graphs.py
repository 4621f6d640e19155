"""SGLang's CUDA graphs of decode and verify steps: their batch sizes and their capture."""

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

from .batches import list_captured
from .server import draft_tokens


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

    sizes, _ = get_batch_sizes_to_capture(model_runner, draft_tokens(config))
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
    in several parts. So `find_largest` limits the captured sizes. If the capture fails, SGLang's list of sizes stays.
    """
    if fits is None:
        _capture_widths(model_runner, scheduler)
        return
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    decode, largest = _read_decode(), find_largest(fits)
    former, decode.bs = decode.bs, limit_sizes(keep_sizes(decode), largest)
    try:
        # All graphs write logits to one buffer, which must hold the largest graph. SGLang keeps every buffer that it
        # has allocated: 128 rows of 150,000 logits take 77 MB.
        model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
        _capture_widths(model_runner, scheduler)
    except Exception:
        decode.bs = former
        raise


def find_largest(fits: Callable[[int], bool]) -> int:
    """Return the number of requests of the largest graph that `capture_again` captures.

    This is the number before SGLang limits it to the size of its request pool.
    """
    from sglang.srt.runtime_context import get_lora

    decode = _read_decode()
    # LoRA's buffers hold the largest batch of the graphs at the start.
    return find_cap(decode.max_bs if get_lora().enable_lora else max(keep_sizes(decode)), fits)


def keep_sizes(decode: Any) -> list[int]:
    """Return SGLang's list of batch sizes from before it limits the list to the sizes that fit the page slots.

    The first call must come before this limit. It keeps the list on `decode`, the configuration of decode graphs.
    """
    if not hasattr(decode, "sizes_before_limit"):
        decode.sizes_before_limit = list(decode.bs)
    sizes: list[int] = decode.sizes_before_limit
    return sizes


def limit_sizes(sizes: Iterable[int], largest: int) -> list[int]:
    """Return the `sizes` below `largest`, and `largest` itself, in ascending order, as SGLang limits its list."""
    return sorted({size for size in sizes if size < largest} | {largest})


def find_cap(largest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number n for which all batches of 1 to n requests fit. It is from 1 to `largest`."""
    return max(takewhile(fits, range(1, largest + 1)), default=1)


def _read_decode() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config.decode


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
