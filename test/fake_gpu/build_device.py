"""Build the libraries of a GPU that is not there and put them in place of those in an environment's packages.

    python build_device.py ENVIRONMENT

libcuda, libcudart and libnvidia-ml are of `device/`; cuBLAS, cuBLASLt and NCCL, whose own runtime would look for a
driver, are stubs whose functions return 0. It takes g++, nm and the headers in NVIDIA's wheels. What the wheels brought
stays in ENVIRONMENT/fake_gpu/published: the names to define are read there.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
WHEELS = ("cu13/lib/libcudart.so.13", "cu13/lib/libcublas.so.13", "cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2")
ANSWERS = {
    "cublasCreate_v2": "void** handle) { *handle = (void*)0x100; return 0; }",
    "cublasLtCreate": "void** handle) { *handle = (void*)0x100; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "void* a, void* b, void* c, void* d, void* e, void* f, void* g, int n, void* r, "
    "int* count) { *count = 1; return 0; }",
    "cublasLtGetVersion": ") { return 130000; }",
    "cublasLtGetCudartVersion": ") { return 13000; }",
    "cublasGetVersion_v2": "void*, int* version) { *version = 130000; return 0; }",
    "cublasGetPointerMode_v2": "void*, int* mode) { *mode = 0; return 0; }",
    "cublasGetMathMode": "void*, int* mode) { *mode = 0; return 0; }",
    "cublasGetStream_v2": "void*, void** stream) { *stream = 0; return 0; }",
    "ncclGetVersion": "int* version) { *version = 22809; return 0; }",
    "ncclCommInitRank": "void** comm, ...) { *comm = (void*)0x100; return 0; }",
    "ncclCommInitRankConfig": "void** comm, ...) { *comm = (void*)0x100; return 0; }",
    "ncclCommGetAsyncError": "void*, int* error) { *error = 0; return 0; }",
    "ncclCommCount": "void*, int* count) { *count = 1; return 0; }",
    "ncclCommUserRank": "void*, int* rank) { *rank = 0; return 0; }",
    "ncclCommCuDevice": "void*, int* device) { *device = 0; return 0; }",
}
"""Parameters and body of the stubs that hand something out."""
TEXTS = {"cublasGetStatusString", "ncclGetErrorString", "ncclGetLastError"}


def build(environment: Path) -> None:
    """Raises subprocess.CalledProcessError where a compiler fails."""
    (nvidia,) = environment.glob("lib/python3*/site-packages/nvidia")
    published, built = environment / "fake_gpu" / "published", environment / "fake_gpu" / "lib"
    published.mkdir(parents=True, exist_ok=True)
    built.mkdir(exist_ok=True)
    for wheel in WHEELS:
        kept = published / Path(wheel).name
        if not kept.exists():
            shutil.copy2(nvidia / wheel, kept)
    include = nvidia / "cu13" / "include"

    def compile_source(source: Path) -> Path:
        built_of = built / f"{source.name}.o"
        flags = ("-std=c++17", "-O1", "-fPIC", "-w", f"-I{include}", f"-I{SOURCES}")
        subprocess.run(["g++", *flags, "-c", source, "-o", built_of], check=True)
        return built_of

    def compile_library(name: str, sources: Iterable[str], stubs: Iterable[str], version: str | None = None) -> None:
        objects = [compile_source(SOURCES / source) for source in sources]
        made = built / f"{name}.cpp"
        made.write_text(_write_stubs(sorted(set(stubs).difference(*map(_list_symbols, objects)))))
        objects.append(compile_source(made))
        linked = [] if name == "libcuda.so.1" else [f"-L{built}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
        if version:
            script = built / f"{name}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            linked.append(f"-Wl,--version-script={script}")
        command: list[str | Path] = ["g++", "-shared", *objects, f"-Wl,-soname,{name}", "-o", built / name, *linked]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)

    device = ("memory.cpp", "capture.cpp", "driver.cpp")
    compile_library("libcuda.so.1", device, _read_driver(include / "cuda.h"))
    compile_library("libnvidia-ml.so.1", ["nvml.cpp"], ())
    for name in (Path(wheel).name for wheel in WHEELS):
        sources = ["runtime.cpp"] if "cudart" in name else []
        compile_library(name, sources, _list_symbols(published / name, "-D"), None if "nccl" in name else name)
    (environment / "fake_gpu" / "bin").mkdir(exist_ok=True)
    shutil.copy2(SOURCES / "nvidia-smi", environment / "fake_gpu" / "bin")
    (built / "libcuda.so").unlink(missing_ok=True)
    (built / "libcuda.so").symlink_to("libcuda.so.1")  # what kernels compiled at run time link to
    for wheel in WHEELS:
        for name in (Path(wheel).name, "libcuda.so.1"):
            place = (nvidia / wheel).parent / name
            place.unlink(missing_ok=True)  # a hard link may lead elsewhere
            shutil.copy2(built / name, place)


def _read_driver(header: Path) -> set[str]:
    """Every function that cuda.h declares, by the name it is linked under."""
    text = header.read_text()
    renamed = dict(re.findall(r"^\s*#\s*define (cu\w+)\s+(cu\w+)\s*$", text, re.MULTILINE))
    return {renamed.get(name, name) for name in re.findall(r"CUDAAPI (cu[A-Z]\w*)\s*\(", text)} | set(renamed.values())


def _list_symbols(library: Path, *options: str) -> set[str]:
    command: list[str | Path] = ["nm", "--defined-only", *options, library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = (line.split()[2].partition("@")[0] for line in lines.splitlines() if line.split()[1] in "TWi")
    return {name for name in names if name.startswith(("cu", "__cu", "nccl", "pnccl"))}


def _write_stubs(names: Iterable[str]) -> str:
    lines = ['#include "fake.h"', 'extern "C" {']
    for name in names:
        if name in TEXTS:
            lines.append(f'const char* {name}() {{ return ""; }}')
        elif name in ANSWERS:
            lines.append(f"{'size_t' if 'LtGet' in name else 'int'} {name}({ANSWERS[name]}")
        else:
            lines.append(f'int {name}() {{ return fake::stub("{name}"); }}')
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    build(Path(sys.argv[1]))
