"""Build the kernels that SGLang 0.5.23 compiles when a server starts, for sm_90a and without a GPU.

    python -m scripts.gpu.build_ahead FOLDER     with the archive's packages on PYTHONPATH, and CUDA_HOME

The packages must include FlashInfer's sources. `scripts/gpu.sh` unpacks FOLDER. `make_site.sh` changes SGLang's loader,
which then searches the folder site/sglang/kernels/jit/ahead. FlashInfer's loader searches the folder
site/flashinfer/data/aot (`JitSpec.aot_path`).
"""

import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from scripts.gpu.build_jit import write_driver

KERNELS = (
    ("attention.clamp_position", "_jit_clamp_position_module", ("int64",)),
    ("attention.rope", "_jit_fused_rope_module", (True, 128, "bfloat16", "bfloat16")),
    ("attention.rope", "_jit_fused_rope_module", (True, 64, "bfloat16", "bfloat16")),
    ("layernorm.norm", "_jit_qknorm_module", (128, "bfloat16")),
    ("activation.activation", "activation_module", ("bfloat16",)),
    ("kvcache.kvcache", "_jit_kvcache_module", (1024, 1024, 64)),
)
"""The kernels that Qwen3-30B-A3B, gpt-oss and its EAGLE-3 draft model need in bf16.

Each entry contains a module in `sglang.kernels.ops`, a builder function and its arguments.
"""


def main(folder: Path) -> None:
    """Build all kernels."""
    with tempfile.TemporaryDirectory() as scratch:
        write_driver(Path(scratch))
        link_headers(Path(scratch) / "include")
        os.environ |= {
            "LIBRARY_PATH": scratch,
            "CPATH": f"{scratch}/include",
            "SGLANG_JIT_CACHE_DIR": f"{scratch}/sglang",
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_WORKSPACE_BASE": scratch,
        }
        build_sglang(folder / "site" / "sglang" / "kernels" / "jit" / "ahead")
        build_flashinfer(folder / "site" / "flashinfer" / "data" / "aot")


def link_headers(place: Path) -> None:
    """Link the headers from torch's wheels that a CUDA toolkit may not contain.

    Other headers are not linked, because they can belong to another version than the toolkit's compiler.
    """
    import nvidia

    place.mkdir()
    for header in Path(next(iter(nvidia.__path__))).glob("cu13/include/cu*.h"):
        if header.name.startswith(("cublas", "curand")):
            (place / header.name).symlink_to(header)


def build_sglang(place: Path) -> None:
    """Build SGLang's own kernels. Each kernel is written to place/<architecture>/<name>.so."""
    import torch

    # The kernels are not loaded after the build, because the loader may not find CUDA's runtime.
    vars(import_module("sglang.kernels.jit.utils.compile.loader"))["_load"] = str
    arch = import_module("sglang.kernels.jit.utils.arch")
    with arch.override_jit_cuda_arch(9, 0, "a"):
        for module, builder, arguments in KERNELS:
            given = (getattr(torch, value) if isinstance(value, str) else value for value in arguments)
            getattr(import_module(f"sglang.kernels.ops.{module}"), builder)(*given)
    for built in Path(os.environ["SGLANG_JIT_CACHE_DIR"]).glob("*/*/build-*/deps-*/*.so"):
        kept = place / built.relative_to(os.environ["SGLANG_JIT_CACHE_DIR"]).parts[0]
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, kept / built.name)


def build_flashinfer(place: Path) -> None:
    """Build FlashInfer's norms, and the kernels that gpt-oss uses for its router and projections up to 128 rows."""
    for module, spec in (("norm", "gen_norm_module"), ("tinygemm2", "gen_tinygemm2_module")):
        made = getattr(import_module(f"flashinfer.jit.{module}"), spec)()
        made.build(verbose=False)
        (place / made.name).mkdir(parents=True)
        shutil.copyfile(made.jit_library_path, place / made.name / f"{made.name}.so")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
