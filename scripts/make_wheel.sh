#!/usr/bin/env bash
# The wheel of sglang-xshare in dist/, with the build backend of the environment: the same source gives the same bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${VENV:-.venv}/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir dist ./python
ls dist/sglang_xshare-*.whl
