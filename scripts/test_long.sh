#!/usr/bin/env bash
# The tests marked `long`, one part after another; a part is one test file. A part that passed at this very state of
# the source is not run again, so that an interrupted run resumes. PART=text runs only the parts whose path has the text.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PART=${PART:-}
done_dir=build/test-long
mkdir -p "$done_dir"
state=$({ git rev-parse HEAD; git diff HEAD; git ls-files -oz --exclude-standard | xargs -0r sha256sum; } | sha256sum)

collected=$("$PYTHON" -m pytest --collect-only -q -m long) && status=0 || status=$?
if [[ $status != 0 && $status != 5 ]]; then  # 5: there is none
    tail -n 25 <<<"$collected" >&2
    echo "test-long: pytest could not collect the tests: status $status" >&2; exit 1
fi
mapfile -t parts < <(sed -n 's/::.*//p' <<<"$collected" | sort -u | grep -F -- "$PART" || true)
if [[ ${#parts[@]} -eq 0 ]]; then
    echo "test-long: PART is '$PART', which no file with tests marked long has in its path" >&2; exit 1; fi
echo "test-long: ${#parts[@]} parts: ${parts[*]}"
failed=()
for part in "${parts[@]}"; do
    passed=$done_dir/${part//\//_}.passed
    if [[ -f $passed && $(<"$passed") == "$state" ]]; then echo "test-long: $part passed before"; continue; fi
    echo "test-long: $part"
    if "$PYTHON" -m pytest -m long --timeout 3600 "$part"; then echo "$state" >"$passed"; else failed+=("$part"); fi
done
if [[ ${#failed[@]} -gt 0 ]]; then echo "test-long: failed: ${failed[*]}" >&2; exit 1; fi
echo "test-long: all ${#parts[@]} parts passed"
