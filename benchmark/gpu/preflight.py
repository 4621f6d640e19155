"""What has to hold before minutes are spent on a GPU: packages, patch, compiler, kernels that run and are right.

    python -m benchmark.gpu.preflight [CHECK...]

The run has each check in a process of its own, so that one that crashes or hangs stops no other. Nothing but the
standard library is imported before a check runs: a package that is missing is named in one line.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmark.gpu.upstream import EXPERTS, TOP_K, UPSTREAM

KERNEL = """
#include <cuda.h>
#include <cuda_runtime.h>
__global__ void fill(int* out) { out[threadIdx.x] = threadIdx.x; }
extern "C" int run(int* out) {
    fill<<<1, 32>>>(out);
    return cuInit(0) + cudaGetLastError();
}
"""
"""Asks for what the kernels ask for that servers compile: CUDA's headers, its runtime and the driver's library."""
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
)
CUDA_MODULES = (
    "deep_gemm",
    "sglang.srt.layers.attention.dsa_backend",
    "sglang.srt.layers.attention.deepseek_v4_backend",
)
"""What EAGLE-3's worker imports when it starts, on a GPU alone. No other task needs it."""
GRAPH_ROWS = 128  # more than part `shapes` may give one program: several, and so a cooperative launch


def check_imports() -> None:
    """Everything that servers, benchmarks and tests import."""
    _import_all(MODULES)


def check_eagle3() -> None:
    """What EAGLE-3's worker imports beside that."""
    _import_all(CUDA_MODULES)


def _import_all(modules: Sequence[str]) -> None:
    wrong: dict[str, str] = {}
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            wrong.setdefault(str(error.name), f"{module} needs {error.name}, which is not installed")
        except Exception as error:  # a library of another CUDA, say
            wrong.setdefault(module, f"{module}: {type(error).__name__}: {error}")
    if wrong:
        raise RuntimeError("; ".join(wrong.values()))


def check_patch() -> None:
    """SGLang carries the patch queue of this checkout."""
    from sglang_xshare.patching.engine import check_patched

    check_patched()


def check_nvcc() -> None:
    """CUDA's compiler and libraries: SGLang builds some kernels when a server starts."""
    home = os.environ.get("CUDA_HOME", "")
    if not (Path(home) / "bin" / "nvcc").exists() or not (Path(home) / "include" / "cuda_runtime.h").exists():
        raise RuntimeError(
            f"CUDA_HOME={home}: needed is a folder with bin/nvcc and include/cuda_runtime.h, beside nvcc, in "
            "/usr/local/cuda* or from torch's wheels; servers compile kernels with it when they start"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "kernel.cu", Path(folder) / "kernel.o"
        source.write_text(KERNEL)
        # As upstream does, both times; its two builders link in the same way.
        _build([f"{home}/bin/nvcc", "-std=c++17", "-arch=sm_90a", "-Xcompiler", "-fPIC", "-c", source, "-o", compiled])
        libraries = [f"-L{home}/lib64", "-lcudart", "-lcuda"]
        _build([os.environ.get("CXX", "c++"), compiled, "-shared", *libraries, "-o", Path(folder) / "kernel.so"])


def _build(command: Sequence[str | Path]) -> None:
    """Run a compiler. Raises RuntimeError with the line in which it names an error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        wrong = next((line for line in said if "error" in line or "cannot find" in line), said[-1] if said else "")
        raise RuntimeError(f"{command[0]}: {wrong or f'status {done.returncode}'}")


def check_cc() -> None:
    """A C compiler and Python's headers: Triton builds with them what launches a kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no gcc or clang on the PATH, and no CC; Triton compiles with it what launches a kernel")
    include = sysconfig.get_paths("posix_prefix")["include"]  # as Triton does: Debian's default is another
    command = [compiler, "-fsyntax-only", "-xc", f"-I{include}", "-"]
    done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{compiler} finds no Python.h in {include}; the package python3-dev, or its like, has it")


def check_compilation() -> None:
    """Our kernels compile and run at every number of experts that a served family has."""
    from benchmark.gpu.compilation import check_all

    failures = check_all()
    if failures:
        raise RuntimeError("; ".join(failures))


def check_compilation_32() -> None:
    """Our kernels compile and run as gpt-oss-20b takes them, with its 32 experts."""
    import_module("benchmark.gpu.compilation").check_served(32)


def check_compilation_128() -> None:
    """Our kernels compile and run as Qwen3-30B-A3B and gpt-oss-120b take them, with their 128 experts."""
    import_module("benchmark.gpu.compilation").check_served(128)


def check_upstream() -> None:
    """Upstream's compiled kernels run on this GPU, and answer as plain torch does."""
    for name, is_right in UPSTREAM.items():
        try:
            right = is_right()
        except Exception as error:  # whatever a kernel that cannot load or launch raises
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
        if not right:
            raise RuntimeError(f"{name}: another answer than torch's")


def check_selection(device: str = "cuda", backend: str = "triton") -> None:
    """Our kernel, captured once in a CUDA graph and replayed for three batches with padding, against the reference."""
    import torch

    from sglang_xshare import Batch, Router, Selection, build_plan, select

    plan, router = build_plan("xshare", k0=1, add=24), Router(top_k=TOP_K)
    logits = torch.zeros(GRAPH_ROWS, EXPERTS, dtype=torch.bfloat16, device=device)
    valid = torch.ones(GRAPH_ROWS, dtype=torch.bool, device=device)

    def run(backend: str = backend) -> Selection:
        return select(logits, plan, router, Batch(valid), backend=backend)

    replay = _capture(run, device)
    for seed, live in enumerate((GRAPH_ROWS, GRAPH_ROWS - 3, 1)):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        valid.copy_(torch.arange(GRAPH_ROWS) < live)
        found, expected = replay(), run("reference")
        for field in ("topk_ids", "selected", "active", "vanilla_active"):
            if not torch.equal(getattr(found, field), getattr(expected, field)):
                raise RuntimeError(f"{field} of {live} rows in a graph of {GRAPH_ROWS}: not the reference's")


def _capture(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """A replay, which returns the answer; without a GPU the call itself."""
    if device == "cpu":
        return run
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = run()

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return answer

    return replay


CHECKS: dict[str, Callable[[], None]] = {
    "imports": check_imports,
    "patch": check_patch,
    "nvcc": check_nvcc,
    "cc": check_cc,
    "compilation": check_compilation,
    "compilation-32": check_compilation_32,
    "compilation-128": check_compilation_128,
    "upstream": check_upstream,
    "selection": check_selection,
    "eagle3": check_eagle3,
}


def main(names: Sequence[str]) -> int:
    """Run these checks, or all, one after another; each that fails is one line on stderr, and the status is 1."""
    status = 0
    for name in names or CHECKS:
        if name not in CHECKS:
            print(f"gpu: check {name}: allowed is {', '.join(CHECKS)}", file=sys.stderr)
            return 1
        try:
            CHECKS[name]()
        except Exception as error:  # a check names what it found; anything else is a failure as well
            text = " ".join(str(error).split())[:300] or type(error).__name__
            print(f"gpu: check {name}: {text}", file=sys.stderr)
            status = 1
        else:
            print(f"gpu: check {name}: passed")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
