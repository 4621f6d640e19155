#!/usr/bin/env bash
# Test SGLang for CUDA on a machine without a GPU: test/fake_gpu builds a stand-in for the driver and the runtime, and the
# tests start servers on the stand-in. The environment, $CUDA_VENV (default: build/cuda/$SGLANG), takes 10 GB and some
# minutes to make. PART=text runs only the tests whose names contain the text; PART may also be an expression of pytest's
# -k. The script needs Python 3.11 or 3.12, g++, and nvcc for kernels that servers compile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SGLANG=${SGLANG:-0.5.23}
venv=${CUDA_VENV:-build/cuda/$SGLANG}
python=$venv/bin/python
refuse() { echo "test-cuda: $1" >&2; exit 1; }

[[ $SGLANG =~ ^[0-9.]+$ && -d patches/$SGLANG ]] || refuse "SGLANG must be one of $(cd patches && echo 0.*) (got $SGLANG)"
command -v g++ >/dev/null || refuse "g++ is missing"
[[ -x ${CUDA_HOME:-}/bin/nvcc ]] || command -v nvcc >/dev/null || compgen -G '/usr/local/cuda*/bin/nvcc' >/dev/null ||
    refuse "nvcc is missing"
wanted=$(cat scripts/test_cuda.sh test/fake_gpu/build_device.py test/fake_gpu/device/* | sha256sum)
if [[ ! -f $venv/.installed ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
        refuse "python3 is $(python3 --version 2>&1); SGLang for CUDA needs 3.11 or 3.12"
    # Only an environment that an interrupted run has begun is removed and made anew.
    [[ -f $venv/.begun || -z $(ls -A "$venv" 2>/dev/null) ]] || refuse "CUDA_VENV=$venv: must be new, empty, or made by test-cuda"
    { rm -rf "$venv" && mkdir -p "$venv" && touch "$venv/.begun"; } 2>/dev/null || refuse "CUDA_VENV=$venv cannot be made"
    echo "test-cuda: making $venv: SGLang $SGLANG for CUDA (10 GB)"
    python3 -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check "sglang==$SGLANG" unidiff hypothesis pytest pytest-timeout pytest-xdist
    touch "$venv/.installed"
fi
found=$("$python" -c 'from importlib.metadata import version; print(version("sglang"))')
[[ $found == "$SGLANG" ]] || refuse "CUDA_VENV=$venv: must have SGLang $SGLANG (got $found); to use it, set SGLANG=$found"
venv=$(cd "$venv" && pwd) python=$venv/bin/python
if [[ ! -f $venv/.device || $(<"$venv/.device") != "$wanted" ]]; then
    "$python" test/fake_gpu/build_device.py "$venv"
    echo "$wanted" >"$venv/.device"
fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Each process of the stand-in imports test/fake_gpu/start.py, which records captures.
echo "import os, sys; 'FAKE_GPU_LOG' in os.environ and (sys.path.append('$PWD/test'), __import__('fake_gpu.start'))" \
    >"$site/fake_gpu.pth"
PYTHONPATH=$PWD/python "$python" -m sglang_xshare patch apply

. test/fake_gpu/environment.sh "$venv"
arguments=(-m pytest -p no:cacheprovider ${PART:+-k "$PART"} test/fake_gpu)
[[ -z ${PART:-} ]] || "$python" "${arguments[@]}" --collect-only -q >/dev/null && status=0 || status=$?
[[ $status != 5 ]] || refuse "PART=$PART: must be a part of a test's name (got none)"  # 5: pytest found no test
exec nice "$python" "${arguments[@]}" --timeout 3600  # what ends this ends pytest, which ends its servers
