"""What every Python process of the environment does first: `fake_gpu.pth` imports it."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

from fake_gpu import acceptance, norms, probe, values, watch


def install_in_torch(torch: Any) -> None:
    """Follow captures and replays; compute what is launched, as far as it is asked for."""
    watch.install(torch.cuda.graphs)
    values.install(torch)
    equal, unique = torch.equal, torch.unique
    torch.equal = lambda a, b: equal(*(values.alias(x) if x.is_cuda else x for x in (a, b)))
    # Experts of a prefill that is paged in, whose router computes nothing: the first few.
    torch.unique = lambda x, *args, **keys: torch.arange(min(len(x), 16)) if x.is_cuda else unique(x, *args, **keys)
    if not os.environ.get("FAKE_GPU_VALUES"):
        _sample_token_zero(torch)


def _sample_token_zero(torch: Any) -> None:
    """Memory that nobody computed holds any token, and one beyond the vocabulary ends its request. A copy is made."""
    argmax = torch.argmax
    zeros: list[Any] = []

    def sample(x: Any, *args: Any, **keys: Any) -> Any:
        found = argmax(x, *args, **keys)
        if found.is_cuda:
            if not zeros:
                zeros.append(torch.zeros(1 << 16, dtype=found.dtype).to(found.device))
            found.copy_(zeros[0][: found.numel()].view_as(found))
        return found

    torch.argmax = sample


def _copy_by_torch(module: Any) -> None:
    """SGLang copies a step's inputs to a graph's by a kernel of its own, and where that does not serve by torch."""
    module.try_small_copy = lambda *args, **keys: False


def _tune_nothing(module: Any) -> None:
    """Triton takes the fastest of a kernel's configurations; nothing has a time here: the first that compiles."""
    measure, infinite = module.Autotuner._bench, [float("inf")] * 3

    def compile_one(self: Any, *args: Any, **keys: Any) -> Any:
        if getattr(self, "compiled_for", None) is self.nargs:  # made anew for each launch
            return infinite
        self.do_bench = lambda call, quantiles: [call() or 0.0] * len(quantiles)
        times = measure(self, *args, **keys)
        if times != infinite:
            self.compiled_for = self.nargs
        return times

    module.Autotuner._bench = compile_one


AFTER: dict[str, Callable[[Any], None]] = {
    "torch": install_in_torch,
    "flashinfer.norm": norms.install,
    "sglang.kernels.ops.memory.small_copy": _copy_by_torch,
    "sglang.srt.speculative.dflash_worker_v2": acceptance.install_blocks,
    "sglang.srt.speculative.dspark_components.dspark_verify": acceptance.install_windows,
    "sglang.srt.speculative.eagle_utils": acceptance.install_verification,
    "sglang.srt.speculative.spec_utils": acceptance.install_simulation,
    "triton.runtime.autotuner": _tune_nothing,
    "sglang_xshare.hooks": watch.install_ours,
    "sglang_xshare.stage.layer": probe.install,
}
"""Module -> what is done with it once it has been imported."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a loader that does this beside."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec; None for every other module."""
        if name not in AFTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute, spec.loader.exec_module = spec.loader.exec_module, lambda module: run(module)  # type: ignore

            def run(module: Any) -> None:
                execute(module)
                AFTER[name](module)

        return spec


sys.meta_path.insert(0, Finder())
