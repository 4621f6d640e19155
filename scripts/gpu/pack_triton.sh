#!/usr/bin/env bash
# Pack the kernels that Triton has compiled on the stand-in for a GPU, for a machine with the same Triton:
# scripts/gpu/pack_triton.sh CACHE fills .gpu/triton.tar.xz, which scripts/gpu.sh unpacks. Triton identifies a kernel by the
# kernel's source, its options and Triton's own files, not by the folder; only the paths in the files __grp__* are rewritten.
# The GPU machine compiles a kernel whose source has changed since.
set -euo pipefail
[[ $# -eq 1 && -d $1 ]] || { echo "pack_triton: CACHE must be a folder, Triton's cache (got ${*:-none})" >&2; exit 1; }
cache=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p .gpu "$work/triton"
# Triton reads a cached kernel from these files alone.
(cd "$cache" && find . -type f \( -name '*.json' -o -name '*.cubin' -o -name '*.so' \) -print0 | tar -c --null --files-from -) |
    tar -x -C "$work/triton"
sed -i "s#$cache/#@TRITON@/#g" "$work"/triton/*/__grp__*
tar -cJf .gpu/triton.tar.xz -C "$work" triton
du -h .gpu/triton.tar.xz
