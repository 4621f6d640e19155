"""Build the two kernels that SGLang 0.5.17 compiles when a gpt-oss server starts, for sm_90a and without a GPU.

    build_jit.py FOLDER     with SGLang, FlashInfer and apache-tvm-ffi of the archive on PYTHONPATH, and CUDA_HOME

`scripts/gpu.sh` unpacks FOLDER. SGLang loads the rotary embedding from tvmcache/<name>/<name>.so (`load_jit`).
FlashInfer loads its kernel from site/flashinfer/data/aot/tinygemm2/tinygemm2.so (`JitSpec.aot_path`).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

DRIVER = "int cuTensorMapEncodeTiled(void) { return 1; }\n"
"""A replacement for the driver library, which exists only on a machine with a GPU. tinygemm2 needs this symbol."""


def main(folder: Path) -> None:
    """Build both kernels."""
    with tempfile.TemporaryDirectory() as scratch:
        write_driver(Path(scratch))
        os.environ |= {
            "LIBRARY_PATH": scratch,
            "TVM_FFI_CACHE_DIR": str(folder / "tvmcache"),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_WORKSPACE_BASE": scratch,
        }
        build_rope()
        build_tinygemm(folder)
    for built in (folder / "tvmcache").glob("*/*"):
        if built.suffix != ".so":
            built.unlink()


def build_rope() -> None:
    """Build the rotary embedding for bf16 heads of 64 elements. It is written to $TVM_FFI_CACHE_DIR."""
    import torch

    # The kernel is not loaded after the build, because the loader may not find CUDA's runtime.
    cpp = import_module("tvm_ffi.cpp")
    vars(cpp)["load_inline"] = cpp.build_inline
    rope = import_module("sglang.kernels.ops.attention.rope")
    with import_module("sglang.kernels.jit.utils").override_jit_cuda_arch(9, 0):
        rope._jit_fused_rope_module(True, 64, torch.bfloat16, torch.bfloat16)


def build_tinygemm(folder: Path) -> None:
    """Build the kernels that gpt-oss uses for its router and projections up to 128 rows."""
    spec = import_module("flashinfer.jit.tinygemm2").gen_tinygemm2_module()
    spec.build(verbose=False)
    place = folder / "site" / "flashinfer" / "data" / "aot" / spec.name
    place.mkdir(parents=True)
    shutil.copyfile(spec.jit_library_path, place / f"{spec.name}.so")


def write_driver(folder: Path) -> None:
    """Build a replacement libcuda.so that kernels can be linked to."""
    source = folder / "driver.c"
    source.write_text(DRIVER)
    compiler = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(folder / "libcuda.so")]
    subprocess.run(compiler, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
