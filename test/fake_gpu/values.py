"""What the GPU that is not there would compute, in the device's own memory; a capture's work is done at each replay.

Always what the host reads again: zeros and the like, copies, and operators of torch on integers, as lengths and places,
where they are few, and on single numbers, as scales.
With FAKE_GPU_VALUES=1 every operator of torch, on the host, and Triton's kernels by their PTX; with =ours those of this
package alone, since SGLang's multiply matrices, which the PTX's interpreter does not.

Nothing else computes: neither libraries' kernels nor tensors of more than LARGEST elements.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 22
FEW = 1 << 16
CONSTANT = ("zeros", "zero_", "new_zeros", "zeros_like", "fill_", "full", "new_full", "full_like", "ones", "arange")
MOVES = ("copy_", "_to_copy", "clone", "index_select")
PASSED_BY = ("empty", "new_empty", "empty_like", "set_", "resize_", "record_stream", "detach", "_local_scalar_dense")
"""Operators that compute nothing, or whose answer the host has already read."""
_told: set[str] = set()
_recording: list[Callable[[], None]] | None = None


def do(work: Callable[[], None]) -> None:
    """Now, or where a stream is captured at each replay."""
    if _recording is None:
        work()
    else:
        _recording.append(work)


def _tell(name: str, error: Exception) -> None:
    if name not in _told:
        _told.add(name)
        print(f"fake GPU: {name} is not computed: {str(error)[:100]}", file=sys.stderr, flush=True)


def alias(tensor: Any) -> Any:
    """A tensor of the CPU in a device tensor's memory."""
    import torch

    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    host = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def install(torch: Any) -> None:
    """From now on, in this thread, compute what is asked of the device."""
    _follow_graphs(torch.cuda.CUDAGraph)
    asked = os.environ.get("FAKE_GPU_VALUES")
    _make_mode(torch, bool(asked)).__enter__()
    if asked:
        _execute_triton(only_ours=asked == "ours")


def _follow_graphs(graph: Any) -> None:
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: Any, *args: Any, **keys: Any) -> None:
        global _recording
        begin(self, *args, **keys)
        _recording = []

    def capture_end(self: Any) -> None:
        global _recording
        self.work, _recording = _recording, None
        end(self)

    def replay_and_compute(self: Any) -> None:
        replay(self)
        for work in self.work:
            work()

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_and_compute


def _make_mode(torch: Any, all_: bool) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    def is_device(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_cuda

    class Compute(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            answer = func(*args, **kwargs)
            name = func.overloadpacket.__name__
            tensors = [leaf for leaf in tree_leaves((args, kwargs, answer)) if isinstance(leaf, torch.Tensor)]
            small = all(tensor.numel() <= (LARGEST if all_ or name in CONSTANT else FEW) for tensor in tensors)
            if not all_ and name not in CONSTANT + MOVES:
                # A weight of one number stays as it was made.
                whole = not any(tensor.is_floating_point() and tensor.dim() for tensor in tensors)
                small = small and whole and name != "uniform_"
            if name not in PASSED_BY and not func.is_view and small and any(map(is_device, tensors)):
                compute(func, args, kwargs, answer)
            return answer

    def compute(func: Any, args: Any, kwargs: Any, answer: Any) -> None:
        hosts = tree_map_only(torch.Tensor, lambda leaf: alias(leaf) if leaf.is_cuda else leaf, (args, kwargs))
        for key, value in (("device", "cpu"), ("pin_memory", False), ("non_blocking", False), ("generator", None)):
            if key in hosts[1]:
                hosts[1][key] = value
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        # An operator that writes into its operands does so in the device's memory; another's answer is copied there.
        made = [alias(leaf) if is_device(leaf) else leaf for leaf in tree_leaves(answer)]
        fresh = [isinstance(leaf, torch.Tensor) and id(leaf) not in given for leaf in tree_leaves(answer)]

        def work() -> None:
            try:
                for target, value, new in zip(made, tree_leaves(func(*hosts[0], **hosts[1])), fresh, strict=True):
                    if new:
                        target.copy_(value)
            except Exception as error:  # no kernel of the CPU, or indices that nobody computed
                _tell(func.overloadpacket.__name__, error)

        do(work)

    return Compute()


def _execute_triton(only_ours: bool) -> None:
    from triton.compiler import compiler

    from fake_gpu.ptx.launcher import Execution, Launcher

    init = compiler.CompiledKernel._init_handles

    def init_handles(self: Any) -> None:
        if self.module is not None:
            return
        init(self)
        is_ours = self.src.fn.fn.__module__.startswith("sglang_xshare.")
        if only_ours and not is_ours:
            return
        launch, launcher = self._run, Launcher(self, Execution(watch=False))

        def execute(*args: Any) -> None:
            try:
                launcher(*args)
            except (RuntimeError, ValueError, KeyError) as error:
                if is_ours:
                    raise
                _tell(self.name, error)

        def run(*args: Any) -> None:
            launch(*args)
            do(lambda: execute(*args))

        self._run = run

    compiler.CompiledKernel._init_handles = init_handles
