#!/usr/bin/env bash
# Make the project's environment in $VENV: SGLang $SGLANG, its dependencies, our package, the tools of the tests. --remove
# removes the environment. A complete environment with these requirements stays unchanged; any other is made anew. The first
# file in the folder is a mark with the path of the checkout that made it; a folder without this checkout's mark is refused.
# The environment is for this machine's GPU, if there is one; SGLANG_XSHARE_DEVICE=cpu makes it for a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
SGLANG=0.5.23
LOG=build/venv.log
refuse() { echo "make_venv: $*" >&2; exit 1; }
[[ $# -eq 0 || $* == --remove ]] || refuse "unexpected argument '$1'; the folder is set by VENV=DIR"

checkout=$(pwd -P)
mark=$VENV/.sglang-xshare
stamp=$VENV/.complete
other="name a new folder with VENV=DIR; docs/patching.md explains how to patch an environment of your own"
if [[ -f $mark ]]; then
    [[ $(<"$mark") == "$checkout" ]] || refuse "$VENV was made by the checkout in $(<"$mark"); $other"
elif [[ -e $VENV && -z $(find "$VENV/" -maxdepth 0 -empty 2>/dev/null) ]]; then
    # Older environments have no mark: accept a complete one inside this checkout.
    [[ $VENV == .venv && -f $stamp ]] || refuse "$VENV is there, and this project did not make it; $other"
fi
empty() {  # keep the mark: after an interrupted removal the folder is still ours
    if [[ -d $VENV ]]; then find "$VENV/" -mindepth 1 -maxdepth 1 ! -name "${mark##*/}" -exec rm -rf {} +; fi
}
if [[ $* == --remove ]]; then
    if [[ -f $mark || -f $stamp ]]; then empty; rm -rf "$VENV"; fi
    exit 0
fi

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    refuse "python3 is $(python3 --version 2>&1); SGLang $SGLANG needs 3.11 or later"; }
device=${SGLANG_XSHARE_DEVICE:-}
[[ $device == cpu || -z $device ]] || refuse "SGLANG_XSHARE_DEVICE must be cpu, or empty for the GPU of this machine (got $device)"
if [[ -z $device ]] && nvidia-smi >/dev/null 2>&1; then device=cuda; else device=cpu; fi

wanted=$({ echo "$device"; pwd; python3 --version
           cat scripts/make_venv.sh scripts/requirements-*.txt python/pyproject.toml sgl-kernel/pyproject.toml; } | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi

mkdir -p build
: >"$LOG"
step() {  # step TEXT COMMAND...: run the command with its output in the log; if it fails, show the end of the log
    local began=$SECONDS
    printf 'venv: %-52s ' "$1"
    if "${@:2}" >>"$LOG" 2>&1; then echo "$((SECONDS - began)) s"; else
        echo "failed"; tail -n 25 "$LOG" >&2; echo "make_venv: '$1' failed; the whole output is in $LOG" >&2; exit 1; fi
}
pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@"; }

echo "venv: making $VENV for a machine with ${device^^} (2 - 4 minutes)"
mkdir -p "$VENV"
echo "$checkout" >"$mark"
empty
step "python3 -m venv" python3 -m venv "$VENV"
if [[ $device == cuda ]]; then
    step "sglang $SGLANG and its CUDA dependencies" pip_install "sglang==$SGLANG"
else
    step "torch and the imports of a text-only server" pip_install -r scripts/requirements-cpu.txt
    step "sglang $SGLANG" pip_install --no-deps "sglang==$SGLANG"
    step "sgl_kernel for the CPU" pip_install --no-deps -e sgl-kernel
fi
step "tools of tests and benchmarks" pip_install -r scripts/requirements-dev.txt
step "sglang-xshare" pip_install -e python
echo "$wanted" >"$stamp"
