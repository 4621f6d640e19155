# What a command needs to find the GPU that is not there: . test/fake_gpu/environment.sh VENV
# FAKE_GPU_GIB and FAKE_GPU_NAME make it another than an H100; FAKE_GPU_LOG is the folder of the processes' logs.
_fake=$1/fake_gpu
export PATH=$_fake/bin:$1/bin:$PATH LD_LIBRARY_PATH=$_fake/lib LIBRARY_PATH=$_fake/lib TRITON_LIBCUDA_PATH=$_fake/lib
export FAKE_GPU_LOG=${FAKE_GPU_LOG:-$_fake/log} FLASHINFER_USE_CUDA_NORM=1
# Nothing that was compiled here goes where a real GPU's programs look for it.
export TRITON_CACHE_DIR=$_fake/cache/triton TORCHINDUCTOR_CACHE_DIR=$_fake/cache/inductor
export TVM_FFI_CACHE_DIR=$_fake/cache/tvm FLASHINFER_WORKSPACE_BASE=$_fake/cache/flashinfer
export SGLANG_JIT_CACHE_DIR=$_fake/cache/sglang
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
mkdir -p "$FAKE_GPU_LOG" "$_fake/cache" "$_fake/include"
# Headers of libraries that a toolkit may lack; all that NVIDIA's wheels bring would be of another compiler's version.
ln -sf "$1"/lib/python3*/site-packages/nvidia/cu13/include/cu{blas,rand}*.h "$_fake/include/"
export CPATH=$_fake/include
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/gpu/toolkit.sh"
find_toolkit "$_fake/toolkit"
