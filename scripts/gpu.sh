#!/usr/bin/env bash
# Check, time and tabulate on an NVIDIA GPU: scripts/gpu.sh [all | EXPERIMENT [PART...]].
# QUICK=1 ends after LIMIT seconds (default 540), unpacking included; the next call continues from there.
# RESULTS=DIR holds the records (default: benchmark/results/<date>-<gpu>; if $OUT is set, build/gpu/results, of which one
# archive is written to $OUT at the end). POLICY is the policy for which experiment tune tunes (default: xshare).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/gpu/toolkit.sh

EXPERIMENTS=(caches selection levers layer server eagle3 replay tune routing)
LIMIT=${LIMIT:-540}
python=
experiment=${1:-all}
shift || true
refuse() { echo "gpu: $1" >&2; exit "${2:-1}"; }
[[ " ${EXPERIMENTS[*]} all " == *" $experiment "* ]] || refuse "EXPERIMENT must be all or one of ${EXPERIMENTS[*]} (got $experiment)"
[[ $experiment != all || $# -eq 0 ]] || refuse "PARTS must come with one EXPERIMENT of ${EXPERIMENTS[*]} (got $*)"
[[ $LIMIT =~ ^[1-9][0-9]*$ ]] || refuse "LIMIT must be a whole number of seconds (got $LIMIT)"
[[ ${QUICK:-0} =~ ^[01]?$ ]] || refuse "QUICK must be 0 or 1 (got $QUICK)"
gpu=
if [[ ${SGLANG_XSHARE_DEVICE:-} != cpu ]]; then
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
fi
[[ -n $gpu ]] || refuse "no NVIDIA GPU answers here; nothing was measured" 2

work=$PWD/build/gpu
today=benchmark/results/$(date -u +%F)-$(tr 'A-Z ' 'a-z-' <<<"$gpu")
results=${RESULTS:-${OUT:+build/gpu/results}}
results=${results:-$today}
mkdir -p "$work" "$results"
# If $OUT is set and RESULTS is not, the run continues today's records of the checkout.
if [[ -z ${RESULTS:-} && $results != "$today" && -d $today ]]; then cp --no-clobber "$today"/*.json "$results"/ 2>/dev/null || true; fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$work/triton} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/inductor}

unpack() { tar -xJf ".gpu/$1.tar.xz" -C "$2" || refuse ".gpu/$1.tar.xz cannot be unpacked; make gpu-bundle makes it anew"; }

use_archive() {  # the SGLang in .gpu/, for a machine that can install nothing
    python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
        refuse "python3 is $(python3 --version 2>&1); the archive in .gpu/ needs 3.12"
    local site=$work/site
    if [[ ! -f $site/.complete ]]; then
        rm -rf "$site" "$work/checked"; mkdir -p "$site"
        unpack site "$site"
        for name in fi_distinfo extras; do if [[ -f .gpu/$name.tar.xz ]]; then unpack $name "$site"; fi; done
        for name in tvmcache jit; do if [[ -f .gpu/$name.tar.xz ]]; then unpack $name "$work"; fi; done
        if [[ -f .gpu/triton.tar.xz ]]; then  # compiled on the stand-in: scripts/gpu/pack_triton.sh
            unpack triton "$work"
            sed -i "s#@TRITON@#$work/triton#g" "$work"/triton/*/__grp__*
        fi
        python3 -m compileall -q -j 0 "$site" >/dev/null || true  # some packages carry files for other Pythons
        if [[ -f .gpu/common_ops_unmodified.so.xz ]]; then  # in place of slimmed ones
            mkdir -p "$site/sgl_kernel/sm90"
            xz -dc .gpu/common_ops_unmodified.so.xz >"$site/sgl_kernel/sm90/common_ops.abi3.so"
        fi
        touch "$site/.complete"
    fi
    [[ -f .gpu/jit.tar.xz ]] || echo "gpu: .gpu/jit.tar.xz is missing; the first gpt-oss server builds two kernels, in about a minute"
    python=python3 target=(--target "$site")
    export PYTHONPATH=$PWD/python:$site TVM_FFI_CACHE_DIR=$work/tvmcache
}

use_venv() {
    # Without this probe pip would retry for minutes.
    if [[ ! -f ${VENV:-.venv}/.complete ]]; then
        timeout 30 python3 -m pip download --quiet --no-deps --retries 0 --timeout 10 --dest "$work/probe" wheel \
            >/dev/null 2>&1 || refuse "no package index answers and .gpu/site.tar.xz is missing; make gpu-bundle FROM=DIR, on a machine with an index, makes .gpu/"
    fi
    scripts/make_venv.sh
    python=${VENV:-.venv}/bin/python target=()
}

bring_back() {  # one archive, complete even if the command is stopped
    [[ -n ${OUT:-} && $OUT != "$results" ]] || return 0
    mkdir -p "$OUT"
    tar -cJf "$work/results.part" -C "$results" . && mv "$work/results.part" "$OUT/results.tar.xz" || cp "$results"/*.json "$OUT"/ || true
}

finish() {  # on every exit: write the table of all records, and copy the records back
    local status=$?
    trap - EXIT
    [[ -z ${keeper:-} ]] || kill "$keeper" 2>/dev/null || true
    if [[ -n ${python:-} ]]; then
        if ((status)); then  # keep the ends of the newest server logs
            mkdir -p "$results/logs"
            { ls -t build/logs/*.log 2>/dev/null || true; } | head -n 8 |
                while read -r log; do tail -c 100000 "$log" >"$results/logs/${log##*/}"; done
        fi
        timeout 60 "$python" -m benchmark.gpu table --out "$results" || true
        bring_back
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 143' TERM

if [[ -f .gpu/site.tar.xz ]]; then use_archive; else use_venv; fi
find_toolkit "$work"
"$python" -m sglang_xshare patch apply "${target[@]}" || echo "gpu: SGLang is not patched: no server or layer is measured" >&2

# A command that is killed at its limit loses only its last seconds.
if [[ -n ${OUT:-} ]]; then while sleep 20; do bring_back; done >/dev/null 2>&1 & keeper=$!; fi
options=(--out "$results")
if [[ ${QUICK:-0} == 1 ]]; then options+=(--limit $((LIMIT > SECONDS ? LIMIT - SECONDS : 1))); fi
if [[ -n ${POLICY:-} ]]; then options+=(--policy "$POLICY"); fi
if [[ $experiment == all ]]; then set --; else set -- "$experiment" "$@"; fi
"$python" -m benchmark.gpu run "$@" "${options[@]}"
