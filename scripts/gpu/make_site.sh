#!/usr/bin/env bash
# Make the archives of SGLang 0.5.23 for a GPU machine that can install nothing, from wheels of the package index:
#
#     scripts/gpu/make_site.sh DIR     fill the folder DIR
#     make gpu-bundle FROM=DIR         take the archives from it
#
# DIR gets site.tar.xz and extras.tar.xz, and jit.tar.xz if nvcc is found. The GPU machine has torch 2.11, which cannot
# load the operators of sglang-kernel 0.4.10: the archive has the Python code of 0.4.10 over the compiled operators of
# 0.4.5. An operator that 0.4.5 lacks is an AttributeError of torch.ops when it is called.
# The script needs Python 3.12 with pip (PYTHON names it, default python3), unzip, and with nvcc also torch for CUDA. It
# downloads 1.5 GB and takes a few minutes.
set -euo pipefail
refuse() { echo "make_site: $1" >&2; exit 1; }
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,/^set /s/^# \?//p' "${BASH_SOURCE[0]}"; exit; fi
[[ $# -eq 1 && $1 != -* ]] || refuse "must have one argument, a folder for the archives (got ${*:-none}); --help explains"
OPERATORS=sglang-kernel==0.4.5
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    refuse "PYTHON must be a Python 3.12 (got $python)"
[[ $version == 3.12 ]] || refuse "PYTHON must be a Python 3.12 (got $python, which is $version)"
command -v unzip >/dev/null || refuse "unzip is missing"
mkdir -p "$1"
to=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. scripts/gpu/toolkit.sh
find_toolkit "$work/toolkit"
[[ -z ${CUDA_HOME:-} ]] || "$python" -c 'import torch' 2>/dev/null ||
    refuse "PYTHON must have torch for CUDA, because nvcc builds jit.tar.xz with torch (got $python without torch)"
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

# Packages that a text-only server imports without using them.
mkdir "$site/IPython"
touch "$site/IPython/__init__.py" "$site/soundfile.py"
echo 'HTML = display = None' >"$site/IPython/display.py"

# Three changes. SGLang identifies a compiled kernel by nvcc, the C++ compiler and the headers, which differ on another
# machine: kernels built ahead are identified by name and architecture alone. Triton 3.6 lacks the AMD GPU that
# triton_kernels tests for, and the column of a kernel's definition, which only debuggers read.
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

if [[ -n ${CUDA_HOME:-} ]]; then
    PYTHONPATH=$site:. "$python" -W ignore -m scripts.gpu.build_ahead "$work/built" >"$work/log" 2>&1 ||
        { tail -n 5 "$work/log" >&2; exit 1; }
    tar -cJf "$to/jit.tar.xz" -C "$work/built" .
else
    echo "make_site: jit.tar.xz is missing, because it needs nvcc; the first servers compile for minutes" >&2
fi

# A text-only server imports none of these files, which was checked on the stand-in for a GPU.
cd "$site"
rm -rf bin b12x build_backend.py build_utils.py sglang/{multimodal_gen,test} flashinfer/{moe_ep,data/{csrc,cutlass,cccl,spdlog}} \
    flashinfer/fused_moe/backends/cudnn_frost/artifacts
find flashinfer/experimental -mindepth 1 -maxdepth 1 ! -name __init__.py ! -name cake_nvfp4_per_token -exec rm -rf {} +
rm -f sglang/srt/rust_extensions/*.so sglang/srt/mem_cache/rust_tree_core/*.so  # of Rust: with torch 2.11 SGLang uses its Python code
find . -name __pycache__ -prune -exec rm -rf {} +
tar -c . | xz -T0 -6 >"$to/site.tar.xz"
rm -f "$to/extras.tar.xz"
grep -v -e '^#' -e deep-gemm "$OLDPWD/scripts/gpu/extras.txt" >"$work/extras.txt"  # EAGLE-3 of 0.5.23 no longer imports deep-gemm
fetch install --no-compile --target "$work/extras" --requirement "$work/extras.txt"
tar -cJf "$to/extras.tar.xz" -C "$work/extras" .
du -h "$to"/*
