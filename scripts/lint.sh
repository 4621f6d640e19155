#!/usr/bin/env bash
# Check the source without running it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${VENV:-.venv}/bin

code=(python/sglang_xshare benchmark training scripts sgl-kernel/sgl_kernel)
tests=(test sgl-kernel/tests)
"$bin/ruff" check .
"$bin/ruff" format --check .
# Docstrings have no sections.
if git grep -nE '^\s+(Args|Raises|Returns|Attributes):$' -- '*.py'; then echo "lint: a section in a docstring" >&2; exit 1; fi
"$bin/mypy" "${code[@]}"
"$bin/mypy" --allow-untyped-defs --allow-incomplete-defs --no-check-untyped-defs "${tests[@]}"
"$bin/python" -m benchmark.records --check
"$bin/python" -m scripts.patch_lint
PYTHONPATH=test "$bin/python" -m docs.check
