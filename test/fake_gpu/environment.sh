# What a command needs to find the GPU that is not there: . test/fake_gpu/environment.sh VENV
# FAKE_GPU_GIB and FAKE_GPU_NAME make it another than an H100; FAKE_GPU_LOG is the folder of the processes' logs.
if [[ ! -d ${1:-}/fake_gpu/lib ]]; then
    echo "environment.sh: '${1:-}' is no environment that make test-cuda has made" >&2; return 1; fi
_venv=$(cd "$1" && pwd) _fake=$(cd "$1" && pwd)/fake_gpu _root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$_root/python
export PATH=$_fake/bin:$_venv/bin:$PATH LD_LIBRARY_PATH=$_fake/lib LIBRARY_PATH=$_fake/lib TRITON_LIBCUDA_PATH=$_fake/lib
export FAKE_GPU_LOG=${FAKE_GPU_LOG:-$_fake/log} FLASHINFER_USE_CUDA_NORM=1
# Nothing that was compiled here goes where a real GPU's programs look for it.
export TRITON_CACHE_DIR=$_fake/cache/triton TORCHINDUCTOR_CACHE_DIR=$_fake/cache/inductor
export TVM_FFI_CACHE_DIR=$_fake/cache/tvm FLASHINFER_WORKSPACE_BASE=$_fake/cache/flashinfer
export SGLANG_JIT_CACHE_DIR=$_fake/cache/sglang SGLANG_DG_CACHE_DIR=$_fake/cache/deep_gemm
export TILELANG_CACHE_DIR=$_fake/cache/tilelang
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
mkdir -p "$FAKE_GPU_LOG" "$_fake/cache" "$_fake/include"
# Headers of libraries that a toolkit may lack; all that NVIDIA's wheels bring would be of another compiler's version.
ln -sf "$_venv"/lib/python3*/site-packages/nvidia/cu13/include/cu{blas,rand}*.h "$_fake/include/"
export CPATH=$_fake/include
. "$_root/scripts/gpu/toolkit.sh"
find_toolkit "$_fake/toolkit"
