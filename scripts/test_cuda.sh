#!/usr/bin/env bash
# SGLang for CUDA on a machine without a GPU: test/fake_gpu builds a stand-in for the driver and the runtime, and its
# tests serve on it. The environment, $CUDA_VENV (default: build/cuda/$SGLANG), takes 10 GB and some minutes to make.
# PART=text runs only the tests whose names have the text. Needed: Python 3.11 or 3.12, g++, and nvcc for what is JIT-compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SGLANG=${SGLANG:-0.5.23}
venv=${CUDA_VENV:-build/cuda/$SGLANG}
python=$venv/bin/python

wanted=$(cat scripts/test_cuda.sh test/fake_gpu/build_device.py test/fake_gpu/device/* | sha256sum)
if [[ ! -f $venv/.installed ]]; then
    echo "test-cuda: making $venv: SGLang $SGLANG for CUDA (10 GB)"
    python3 -m venv --clear "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check "sglang==$SGLANG" unidiff hypothesis pytest pytest-timeout
    touch "$venv/.installed"
fi
venv=$(cd "$venv" && pwd) python=$venv/bin/python
if [[ ! -f $venv/.device || $(<"$venv/.device") != "$wanted" ]]; then
    "$python" test/fake_gpu/build_device.py "$venv"
    echo "$wanted" >"$venv/.device"
fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Every process that finds the stand-in follows captures: test/fake_gpu/start.py.
echo "import os, sys; 'FAKE_GPU_LOG' in os.environ and (sys.path.append('$PWD/test'), __import__('fake_gpu.start'))" \
    >"$site/fake_gpu.pth"
PYTHONPATH=$PWD/python "$python" -m sglang_xshare patch apply

. test/fake_gpu/environment.sh "$venv"
exec nice "$python" -m pytest -p no:cacheprovider --timeout 3600 ${PART:+-k "$PART"} test/fake_gpu
