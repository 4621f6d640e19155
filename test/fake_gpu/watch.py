"""What the driver cannot know of our own code: whether memory that a graph reads is still there, and where we wait.

A line "VIOLATION ..." in the process's log says that a graph is replayed which reads a tensor, made before its capture,
that is gone. "SYNC NAME N" says that a call of ours has waited for the device N times.
"""

import ctypes
import functools
import sys
from types import FrameType
from typing import Any

core = ctypes.CDLL("libcuda.so.1")
PACKAGE = "/sglang_xshare/"
BETWEEN = ("/torch/", "/triton/", "/fake_gpu/", "<")  # frames that only hand on
_read: list[tuple[Any, int, str]] | None = None
"""Of the capture under way: what our code reads, its address, and where."""


def say(line: str) -> None:
    """Write a line to the log of the process."""
    core.fake_gpu_say(line.encode())


def find_caller() -> str | None:
    """Where our package asks for what runs now; None where upstream does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in BETWEEN):
        frame = frame.f_back
    if frame is None or PACKAGE not in frame.f_code.co_filename:
        return None
    return f"{frame.f_code.co_filename.partition(PACKAGE)[2]}:{frame.f_lineno}"


def note(tensor: Any) -> None:
    """Remember a tensor that a capture under way reads, if our code has it read."""
    # An empty one has no memory that could go.
    if _read is not None and tensor.is_cuda and tensor.numel() and (where := find_caller()):
        from torch.multiprocessing.reductions import StorageWeakRef

        _read.append((StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), where))


def install(module: Any) -> None:
    """Follow the captures and replays of module `torch.cuda.graphs`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in tree_iter((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    note(leaf)
            return func(*args, **(kwargs or {}))

    graph = module.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay
    modes: list[Watch] = []

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global _read
        begin(self, *args, **kwargs)
        _read = []
        modes.append(Watch())
        modes[-1].__enter__()

    def capture_end(self: Any) -> None:
        global _read
        modes.pop().__exit__(None, None, None)
        end(self)
        read, _read = _read or [], None
        pools = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        ]
        # What was made inside the capture stays in the graph's own pool.
        self.read = [entry for entry in read if not any(first <= entry[1] < last for first, last in pools)]

    def replay_read(self: Any) -> None:
        for storage, _, where in getattr(self, "read", ()):
            if storage.expired():
                say(f"VIOLATION a replay reads memory that is gone: {where}")
        replay(self)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_read


def install_ours(hooks: Any) -> None:
    """Count the waits in what upstream calls of ours, at every start and in every step."""
    for name, hook in vars(hooks).items():
        if callable(hook) and getattr(hook, "__module__", None) == hooks.__name__ and not isinstance(hook, type):
            setattr(hooks, name, _count(hook, name))
    from sglang_xshare.stage.layer import Layer
    from sglang_xshare.stage.reports import Reports
    from sglang_xshare.stage.stage import Stage

    calls = (Stage, "begin_forward"), (Reports, "publish_if_due"), (Stage, "end_forward"), (Layer, "choose")
    for owner, name in calls:
        setattr(owner, name, _count(getattr(owner, name), name))


def _count(call: Any, name: str) -> Any:
    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = core.fake_gpu_waits()
        try:
            return call(*args, **kwargs)
        finally:
            if waits := core.fake_gpu_waits() - before:
                say(f"SYNC {name} {waits}")

    return counted
