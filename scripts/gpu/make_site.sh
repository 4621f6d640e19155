#!/usr/bin/env bash
# Make the archives of SGLang 0.5.23 for a GPU machine that can install nothing, of the package index's wheels alone:
# scripts/gpu/make_site.sh DIR, which `make gpu-bundle FROM=DIR` takes. That machine has torch 2.11, which sglang-kernel
# 0.4.10 is not for: its Python goes with the compiled operators of 0.4.5, and one that these lack is an AttributeError of
# torch.ops where it is called. Needed: Python 3.12 with torch for CUDA (PYTHON, default python3), unzip, and nvcc for
# jit.tar.xz. It takes 1.5 GB to download and a few minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OPERATORS=sglang-kernel==0.4.5
to=${1:?make_site.sh DIR: a folder for the archives is needed}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    { echo "make_site: $("$python" --version 2>&1): needed is 3.12, which PYTHON may name" >&2; exit 1; }
mkdir -p "$to"
to=$(cd "$to" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site

platform=(--python-version 3.12 --implementation cp --only-binary=:all:)
for tag in manylinux2014 manylinux_2_17 manylinux_2_28 manylinux_2_34; do platform+=(--platform "${tag}_x86_64"); done
fetch() { "$python" -m pip "$1" --quiet --disable-pip-version-check --no-deps "${platform[@]}" "${@:2}"; }
fetch install --no-compile --target "$site" --requirement scripts/gpu/site-0.5.23.txt
fetch download --dest "$work" "$OPERATORS"
mkdir -p "$work/operators"
unzip -q "$work"/sglang_kernel-*.whl sgl_kernel/sm90/common_ops.abi3.so -d "$work/operators"
find "$site/sgl_kernel" -name '*.so' -delete
mkdir -p "$site/sgl_kernel/sm90"
mv "$work/operators/sgl_kernel/sm90/common_ops.abi3.so" "$site/sgl_kernel/sm90/"

# What a text-only server imports, but does not use.
mkdir "$site/IPython"
touch "$site/IPython/__init__.py" "$site/soundfile.py"
echo 'HTML = display = None' >"$site/IPython/display.py"

# Three changes. SGLang knows a kernel that is compiled already by nvcc, by the C++ compiler and by its headers; those of
# another machine differ, and what was built ahead is known by its name and architecture alone. Triton 3.6 knows neither a
# GPU of AMD's that triton_kernels asks for, nor where in a line a kernel is defined, which only debuggers read.
"$python" - "$site" <<'EDIT'
import sys
from pathlib import Path


def edit(name, old, new):
    path = Path(sys.argv[1]) / name
    assert path.read_text().count(old) == 1, f"make_site: {name}: not that of 0.5.23"
    path.write_text(path.read_text().replace(old, new))


line = "    return cache.find_prebuilt(scope=scope, module_name=spec.module_name)\n"
ahead = """    ahead = pathlib.Path(__file__).parents[2] / "ahead" / scope.parents[1].name / f"{spec.module_name}.so"
    if ahead.exists():
        return ahead
"""
edit("sglang/kernels/jit/utils/compile/loader.py", line, ahead + line)
other = "@triton.constexpr_function\ndef is_hip_gfx1250():\n    return False\n\n\n"
edit("triton_kernels/target_info.py", "    is_hip_gfx1250,\n)\n\n", ")\n\n" + other)
line = "    ret.def_file_line_number = adjust_line_number(fn.def_file_line_number)\n"
edit("triton_kernels/specialize.py", line + "    ret.def_file_col_number = fn.def_file_col_number\n", "")
EDIT

. scripts/gpu/toolkit.sh
find_toolkit "$work/toolkit"
if [[ -n ${CUDA_HOME:-} ]]; then
    PYTHONPATH=$site:. "$python" -W ignore -m scripts.gpu.build_ahead "$work/built" >"$work/log" 2>&1 ||
        { tail -n 5 "$work/log" >&2; exit 1; }
    tar -cJf "$to/jit.tar.xz" -C "$work/built" .
else
    echo "make_site: no CUDA toolkit: without jit.tar.xz the first servers compile for minutes" >&2
fi

# Not imported by a text-only server without a draft of images: checked on the stand-in for a GPU.
cd "$site"
rm -rf bin b12x build_backend.py build_utils.py sglang/{multimodal_gen,test} flashinfer/{moe_ep,data/{csrc,cutlass,cccl,spdlog}} \
    flashinfer/fused_moe/backends/cudnn_frost/artifacts
find flashinfer/experimental -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name cake_nvfp4_per_token -exec rm -rf {} +
rm -f sglang/srt/rust_extensions/*.so sglang/srt/mem_cache/rust_tree_core/*.so  # of Rust: torch 2.11 has Python's
find . -name __pycache__ -prune -exec rm -rf {} +
tar -c . | xz -T0 -6 >"$to/site.tar.xz"
rm -f "$to/extras.tar.xz"
grep -v -e '^#' -e deep-gemm "$OLDPWD/scripts/gpu/extras.txt" >"$work/extras.txt"  # which 0.5.23's EAGLE-3 imports no longer
fetch install --no-compile --target "$work/extras" --requirement "$work/extras.txt"
tar -cJf "$to/extras.tar.xz" -C "$work/extras" .
du -h "$to"/*
