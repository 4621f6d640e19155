#!/usr/bin/env bash
# Make .gpu/extras.tar.xz: what our own code and tests import beside SGLang, for a Python 3.12 that can install nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=(unidiff rich psutil prometheus-client requests pytest pytest-timeout hypothesis)

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-compile --target "$site" \
    --python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
    --only-binary=:all: --constraint scripts/requirements-dev.txt "${packages[@]}"
mkdir -p .gpu
tar -cJf .gpu/extras.tar.xz -C "$site" .
du -h .gpu/extras.tar.xz
