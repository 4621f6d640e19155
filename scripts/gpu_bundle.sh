#!/usr/bin/env bash
# Fill .gpu/ for a GPU machine that can install nothing: the archives in FROM, and extras.tar.xz made of the packages in
# scripts/gpu/extras.txt, for its Python 3.12. scripts/gpu/site.txt lists what is in the archive of SGLang, machine.txt
# what the machine has; a test imports server and benchmarks with these three alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FROM=${FROM:-}
LIMIT_MIB=64  # what may travel to such a machine, together with the checkout

if [[ -n $FROM ]]; then
    [[ -f $FROM/site.tar.xz ]] || { echo "gpu-bundle: FROM=$FROM: no site.tar.xz there; needed is a folder with the archive of SGLang" >&2; exit 1; }
    mkdir -p .gpu
    for name in site.tar.xz fi_distinfo.tar.xz tvmcache.tar.xz common_ops_unmodified.so.xz; do
        if [[ -f $FROM/$name ]]; then cp "$FROM/$name" .gpu/; fi
    done
elif [[ ! -f .gpu/site.tar.xz ]]; then
    echo "gpu-bundle: .gpu/site.tar.xz is missing; FROM=DIR names a folder with the archive of SGLang" >&2; exit 1
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
grep -v '^#' scripts/gpu/extras.txt >"$site.txt"
trap 'rm -rf "$site" "$site.txt"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$site" \
    --python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
    --only-binary=:all: --constraint scripts/requirements-dev.txt --requirement "$site.txt"
tar -cJf .gpu/extras.tar.xz -C "$site" .
size=$(du -sm .gpu | cut -f 1)
du -h .gpu/*
if ((size > LIMIT_MIB)); then echo "gpu-bundle: .gpu/ has $size MiB; at most $LIMIT_MIB MiB may travel" >&2; exit 1; fi
