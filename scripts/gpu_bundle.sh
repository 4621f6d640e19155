#!/usr/bin/env bash
# Fill .gpu/ for a GPU machine that can install nothing: copy the archives in FROM, and, if FROM has no extras.tar.xz, make
# it of the packages in scripts/gpu/extras.txt, for that machine's Python 3.12. scripts/gpu/site.txt lists the packages in
# the archive of SGLang 0.5.17, site-0.5.23.txt those of the archive that scripts/gpu/make_site.sh makes, machine.txt those
# of the machine. .gpu/commit names the source for the records of a machine without git.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FROM=${FROM:-}
LIMIT_MIB=64  # the most that such a machine accepts, the checkout included

if [[ -n $FROM ]]; then
    [[ -f $FROM/site.tar.xz ]] || { echo "gpu-bundle: FROM=$FROM: must be a folder with the archive of SGLang (got no site.tar.xz)" >&2; exit 1; }
    mkdir -p .gpu
    for name in site extras fi_distinfo tvmcache jit common_ops_unmodified; do
        rm -f .gpu/$name.*  # archives of another release
        for archive in "$FROM/$name".*.xz; do if [[ -f $archive ]]; then cp "$archive" .gpu/; fi; done
    done
elif [[ ! -f .gpu/site.tar.xz ]]; then
    echo "gpu-bundle: .gpu/site.tar.xz is missing; FROM=DIR names a folder with the archive of SGLang" >&2; exit 1
fi

site=$(mktemp -d)
trap 'rm -rf "$site" "$site.txt"' EXIT
if [[ ! -f .gpu/extras.tar.xz ]]; then
    grep -v '^#' scripts/gpu/extras.txt >"$site.txt"
    python3 -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$site" \
        --python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        --only-binary=:all: --constraint scripts/requirements-dev.txt --requirement "$site.txt"
    tar -cJf .gpu/extras.tar.xz -C "$site" .
fi

# Build the kernels that gpt-oss's servers would compile, with the archive's own SGLang and FlashInfer, for the archive's
# apache-tvm-ffi, 0.1.11: this environment has only some of the packages that both need. `&&` joins all steps, because
# `set -e` is off for a call before `||`: otherwise an archive with one kernel would pass for an archive with both.
build_jit() {
    local from=$site.jit
    mkdir -p "$from/archive" "$from/packages" &&
        tar -xJf .gpu/site.tar.xz -C "$from/archive" &&
        tar -xJf .gpu/fi_distinfo.tar.xz -C "$from/archive" &&
        ln -s "$from/archive/"{sglang,flashinfer}* "$from/packages/" &&
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$from/packages" apache-tvm-ffi==0.1.11 nvidia-ml-py &&
        PYTHONPATH=$from/packages "$python" -W ignore scripts/gpu/build_jit.py "$from/built" &&
        tar -cJf .gpu/jit.tar.xz.part -C "$from/built" . &&
        mv .gpu/jit.tar.xz.part .gpu/jit.tar.xz
}

. scripts/gpu/toolkit.sh
python=${VENV:-.venv}/bin/python
if [[ ! -f .gpu/jit.tar.xz && -f .gpu/fi_distinfo.tar.xz && -x $python ]]; then
    find_toolkit "$site.toolkit"
    trap 'rm -rf "$site" "$site".* .gpu/jit.tar.xz.part' EXIT
    if [[ -n ${CUDA_HOME:-} ]]; then
        (build_jit) >"$site.log" 2>&1 || tail -n 3 "$site.log" >&2
    fi
fi
[[ -f .gpu/jit.tar.xz ]] || echo "gpu-bundle: jit.tar.xz is missing, because it needs CUDA's toolkit and .venv; servers build its kernels when they start" >&2
PYTHONPATH=. python3 -c "from benchmark.common.source import carry; carry()"
du -h .gpu/*
# A deleted file that git still lists is no failure.
size=$({ git ls-files -coz --exclude-standard; find .gpu -type f -print0; } |
    { du -c --apparent-size -B 1M --files0-from=- 2>/dev/null || true; } | tail -n 1 | cut -f 1)
if ((size > LIMIT_MIB)); then
    echo "gpu-bundle: checkout and .gpu/ have $size MiB; at most $LIMIT_MIB MiB may travel" >&2; exit 1; fi
