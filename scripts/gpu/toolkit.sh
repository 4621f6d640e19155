# The CUDA toolkit of servers that compile kernels; scripts/gpu.sh sources this file. find_toolkit SCRATCH [HOME...]
# exports CUDA_HOME, a folder with bin/nvcc and include/cuda_runtime.h, and LIBRARY_PATH with a libcuda.so to link to.
# Without such a folder CUDA_HOME is unset, and the preflight reports what is missing. HOME... are the folders that are
# searched after CUDA_HOME and nvcc's own folder (default: /usr/local/cuda*).

is_toolkit() { [[ -x $1/bin/nvcc && -f $1/include/cuda_runtime.h ]]; }

find_toolkit() {
    local scratch=$1 nvcc wrapped home folder; shift
    [[ $# -gt 0 ]] || set -- /usr/local/cuda $(compgen -G '/usr/local/cuda-*' | sort -rV)
    nvcc=$(command -v nvcc) || nvcc=
    wrapped=$(readlink -f "${nvcc:-/}")
    # nvcc may be a script in a bin folder, far from the headers.
    set -- "${CUDA_HOME:-}" "${nvcc%/bin/nvcc}" "${wrapped%/bin/nvcc}" "$@"
    unset CUDA_HOME
    for home; do
        if [[ -n $home ]] && is_toolkit "$home"; then export CUDA_HOME=$home; break; fi
    done
    if [[ -z ${CUDA_HOME:-} && -n $nvcc ]] && folder=$(torch_toolkit); then compose "$scratch/cuda" "$nvcc" "$folder"; fi
    # Some machines have only the driver's libcuda.so.1, and -lcuda makes a linker look for libcuda.so.
    if folder=$(find_libcuda); then
        mkdir -p "$scratch/lib"
        ln -sfn "$folder" "$scratch/lib/libcuda.so"
        export LIBRARY_PATH=$scratch/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    fi
}

torch_toolkit() {  # print the folder of the headers and libraries of torch's wheels, if it has the headers
    local found
    found=$(python3 -c 'import importlib.util as util
print(next(iter(util.find_spec("nvidia").submodule_search_locations)) + "/cu13")' 2>/dev/null) || return 1
    [[ -f $found/include/cuda_runtime.h ]] && echo "$found"
}

compose() {  # compose FOLDER NVCC TORCHS: make a toolkit of an nvcc and of torch's headers and libraries
    rm -rf "$1"; mkdir -p "$1/bin" "$1/lib64"
    printf '#!/bin/sh\nexec %q "$@"\n' "$2" >"$1/bin/nvcc"; chmod +x "$1/bin/nvcc"  # a link would lose nvcc its folder
    ln -s "$3/include" "$1/include"
    ln -s "$(ls "$3"/lib/libcudart.so.* | head -n 1)" "$1/lib64/libcudart.so"
    export CUDA_HOME=$1
}

find_libcuda() {  # print the path of the driver's 64-bit library; ldconfig marks the 32-bit library with (libc6)
    local place name known=${LD_LIBRARY_PATH:-}
    for place in ${known//:/ } $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null |
        sed -n 's#.*(libc6,.*=> \(/.*\)/libcuda\.so.*#\1#p') /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/local/nvidia/lib64; do
        for name in libcuda.so.1 libcuda.so; do
            if [[ -e $place/$name ]]; then echo "$place/$name"; return; fi
        done
    done
    return 1
}
