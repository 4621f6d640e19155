"""Checks that must pass before GPU time is spent: packages, patches, compilers and correct kernels.

    python -m benchmark.gpu.preflight [CHECK...]

The GPU run starts each check in its own process, so a check that crashes or hangs does not stop other checks. This
module imports only the standard library before a check runs, so a missing package is reported in one line.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

KERNEL = """
#include <cuda.h>
#include <cuda_runtime.h>
__global__ void fill(int* out) { out[threadIdx.x] = threadIdx.x; }
extern "C" int run(int* out) {
    fill<<<1, 32>>>(out);
    return cuInit(0) + cudaGetLastError();
}
"""
"""A kernel that needs CUDA's headers, runtime and driver library, like the kernels that servers compile."""
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.gpt_oss",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.benchmark.serving",
    "sglang_xshare.cli",
    "unidiff",
    "benchmark.gpu.__main__",
    "pytest_timeout",
    "xdist",
)
CUDA_MODULES = (
    "deep_gemm",
    "sglang.srt.layers.attention.dsa_backend",
    "sglang.srt.layers.attention.deepseek_v4_backend",
)
"""The modules that only EAGLE-3's worker imports when it starts on a GPU."""
GRAPH_ROWS, EXPERTS, TOP_K = 128, 128, 8
"""The batch of the check `selection`. It has too many rows for one program, so the launch is cooperative."""


def check_imports() -> None:
    """Import all modules that servers, benchmarks and tests need."""
    import_all(MODULES)


def check_eagle3() -> None:
    """Import the modules that only EAGLE-3's worker needs."""
    import_all(CUDA_MODULES)


def import_all(modules: Sequence[str]) -> None:
    """Import all modules. Raises RuntimeError with a list of the modules that cannot be imported."""
    wrong: dict[str, str] = {}
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            wrong.setdefault(str(error.name), f"{module} needs {error.name}, which is not installed")
        except Exception as error:  # for example, a library for another CUDA version
            wrong.setdefault(module, f"{module}: {type(error).__name__}: {error}")
    if wrong:
        raise RuntimeError("; ".join(wrong.values()))


def check_patch() -> None:
    """Check that the installed SGLang contains the patches of this checkout."""
    import_module("sglang_xshare.patching.engine").check_patched()


def check_nvcc() -> None:
    """Build a kernel with CUDA's compiler and libraries, as SGLang does when a server starts."""
    home = os.environ.get("CUDA_HOME", "")
    if not (Path(home) / "bin" / "nvcc").exists() or not (Path(home) / "include" / "cuda_runtime.h").exists():
        raise RuntimeError(
            "CUDA_HOME must be a folder with bin/nvcc and include/cuda_runtime.h, beside nvcc, in /usr/local/cuda* or "
            f"from torch's wheels (got {home!r}); servers compile kernels with it when they start"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "kernel.cu", Path(folder) / "kernel.o"
        source.write_text(KERNEL)
        # These are the same commands as in SGLang's builders.
        _build([f"{home}/bin/nvcc", "-std=c++17", "-arch=sm_90a", "-Xcompiler", "-fPIC", "-c", source, "-o", compiled])
        libraries = [f"-L{home}/lib64", "-lcudart", "-lcuda"]
        _build([os.environ.get("CXX", "c++"), compiled, "-shared", *libraries, "-o", Path(folder) / "kernel.so"])


def _build(command: Sequence[str | Path]) -> None:
    """Run a compiler. If it fails, raise RuntimeError with the line that contains the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        wrong = next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
        raise RuntimeError(f"{command[0]}: {wrong}")


def check_compilation(experts: int) -> None:
    """Compile and run the selection kernels for models with this number of experts."""
    import_module("benchmark.gpu.compilation").check_served(experts)


def check_upstream() -> None:
    """Run SGLang's compiled kernels on this GPU and compare their results with PyTorch."""
    for name, is_right in import_module("benchmark.gpu.upstream").UPSTREAM.items():
        try:
            right = is_right()
        except Exception as error:  # a kernel that cannot load or launch can raise any type of exception
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
        if not right:
            raise RuntimeError(f"{name}: the answer must equal torch's")


def check_selection(device: str = "cuda", backend: str = "triton") -> None:
    """Replay the selection kernel in a CUDA graph for three padded batches, and compare it with the reference."""
    import torch

    from sglang_xshare import Batch, Router, Selection, build_plan, select

    plan, router = build_plan("xshare", k0=1, add=24), Router(top_k=TOP_K)
    logits = torch.zeros(GRAPH_ROWS, EXPERTS, dtype=torch.bfloat16, device=device)
    valid = torch.ones(GRAPH_ROWS, dtype=torch.bool, device=device)

    def run(backend: str = backend) -> Selection:
        return select(logits, plan, router, Batch(valid), backend=backend)

    captured: list[Selection] = []
    if device != "cpu":
        from benchmark.gpu.timing import capture

        graph = capture(lambda: captured.append(run()))
    for seed, live in enumerate((GRAPH_ROWS, GRAPH_ROWS - 3, 1)):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        valid.copy_(torch.arange(GRAPH_ROWS) < live)
        if captured:
            graph.replay()
        found, expected = captured[-1] if captured else run(), run("reference")
        for field in ("topk_ids", "selected", "active", "vanilla_active"):
            if not torch.equal(getattr(found, field), getattr(expected, field)):
                raise RuntimeError(f"{field} of {live} rows in a graph of {GRAPH_ROWS}: not the reference's")


CHECKS: dict[str, Callable[[], None]] = {
    "imports": check_imports,
    "patch": check_patch,
    "nvcc": check_nvcc,
    "compilation-32": partial(check_compilation, 32),
    "compilation-128": partial(check_compilation, 128),
    "upstream": check_upstream,
    "selection": check_selection,
    "eagle3": check_eagle3,
}


def main(names: Sequence[str]) -> int:
    """Run the named checks, or all checks by default.

    Print one line to stderr for each failure, and return 1 if a check fails.
    """
    status = 0
    for name in names or CHECKS:
        if name not in CHECKS:
            print(f"gpu: the check must be one of {', '.join(CHECKS)} (got {name})", file=sys.stderr)
            return 1
        try:
            CHECKS[name]()
        except Exception as error:  # every exception counts as a failure of the check
            text = " ".join(str(error).split())[:300] or type(error).__name__
            print(f"gpu: check {name}: {text}", file=sys.stderr)
            status = 1
        else:
            print(f"gpu: check {name}: passed")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
