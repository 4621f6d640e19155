#!/usr/bin/env bash
# Check, time and tabulate on an NVIDIA GPU: scripts/gpu.sh [selection|layer|server|eagle3|replay|tune|all] [MODEL...]
# An experiment ends inside ten minutes, keeps every point it has measured, and goes on from there when it is run again.
# RESULTS=DIR holds the records (default: $OUT, else benchmark/results/<date>-<gpu>); LIMIT is an experiment's seconds;
# POLICY=xshare:k0=1,add=24 is what experiment tune tunes for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXPERIMENTS=(selection layer server eagle3 replay tune)
LIMIT=${LIMIT:-570}
experiment=${1:-all}
shift || true
if [[ " ${EXPERIMENTS[*]} all " != *" $experiment "* ]]; then
    echo "gpu: experiment '$experiment': allowed is ${EXPERIMENTS[*]} or all" >&2; exit 1; fi
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
[[ -n $gpu ]] || { echo "gpu: no NVIDIA GPU answers here; nothing was measured" >&2; exit 2; }

work=$PWD/build/gpu
today=benchmark/results/$(date -u +%F)-$(tr 'A-Z ' 'a-z-' <<<"$gpu")
results=${RESULTS:-${OUT:-$today}}
mkdir -p "$work" "$results"
# Where the results go elsewhere, what the checkout has of today is continued there.
if [[ $results != "$today" && -d $today ]]; then cp --no-clobber "$today"/*.json "$results"/ 2>/dev/null || true; fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$work/triton} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/inductor}

unpack() { tar -xJf ".gpu/$1.tar.xz" -C "$2"; }

use_archive() {  # the SGLang in .gpu/, for a machine that can install nothing
    python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
        echo "gpu: python3 is $(python3 --version 2>&1); the archive in .gpu/ needs 3.12" >&2; exit 1; }
    local site=$work/site
    if [[ ! -f $site/.complete ]]; then
        rm -rf "$site"; mkdir -p "$site"
        unpack site "$site"
        if [[ -f .gpu/fi_distinfo.tar.xz ]]; then unpack fi_distinfo "$site"; fi
        if [[ -f .gpu/extras.tar.xz ]]; then unpack extras "$site"; fi
        if [[ -f .gpu/tvmcache.tar.xz ]]; then unpack tvmcache "$work"; fi
        python3 -m compileall -q -j 0 "$site" >/dev/null || true  # some packages carry files for other Pythons
        touch "$site/.complete"
    fi
    python=python3 target=(--target "$site")
    export PYTHONPATH=$PWD/python:$site TVM_FFI_CACHE_DIR=$work/tvmcache
    if command -v nvcc >/dev/null; then CUDA_HOME=$(dirname "$(dirname "$(command -v nvcc)")"); export CUDA_HOME; fi
}

use_venv() {
    scripts/make_venv.sh
    python=${VENV:-.venv}/bin/python target=()
}

check_kernels() {  # fall back on the kernels as they were published where the archive's slimmed ones do not run
    "$python" -m benchmark.gpu.preflight && return
    local published=.gpu/common_ops_unmodified.so.xz
    [[ $python == python3 && -f $published ]] || exit 1
    echo "gpu: unpacking the unmodified kernels"
    xz -dc "$published" >"$work/site/sgl_kernel/sm90/common_ops.abi3.so"
    "$python" -m benchmark.gpu.preflight || exit 1
}

failed=()
run_experiment() {  # run_experiment EXPERIMENT [MODEL...], within what is left of its time
    local limit=$((LIMIT - SECONDS)) status=0 options=(--out "$results")
    ((limit > 0)) || limit=1
    if [[ $1 == tune && -n ${POLICY:-} ]]; then options+=(--policy "$POLICY"); fi
    echo "gpu: $*, at most $limit s, into $results"
    # In the foreground, so that Ctrl-C reaches it; its servers die with it.
    timeout --foreground --kill-after=20 "$limit" "$python" -m benchmark.gpu "$@" "${options[@]}" || status=$?
    SECONDS=0
    ((status == 0)) && return
    failed+=("$1")
    if ((status == 124 || status == 137)); then
        echo "gpu: $1: stopped at its limit; what it measured is kept, and the same command goes on from there" >&2; fi
}

if [[ -f .gpu/site.tar.xz ]]; then use_archive; else use_venv; fi
"$python" -m sglang_xshare patch apply "${target[@]}"
check_kernels
if [[ $experiment != all ]]; then run_experiment "$experiment" "$@"; else
    SECONDS=0
    run_experiment selection
    run_experiment layer
    for model in qwen3-30b-a3b gpt-oss-120b gpt-oss-20b qwen3-30b-a3b-aligned; do run_experiment server "$model"; done
    run_experiment eagle3
    run_experiment replay
    run_experiment tune
fi
"$python" -m benchmark.gpu table --out "$results" || true
if ((${#failed[@]})); then echo "gpu: not finished: ${failed[*]}" >&2; exit 1; fi
