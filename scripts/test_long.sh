#!/usr/bin/env bash
# Run the tests marked `long`, one part for each test file, LANES parts at once (default 1), longest part of the last run
# first. A part that passed at this state of the source is skipped, so an interrupted run resumes. After a change of the
# documents alone, only the parts that read documents run again. PART=text runs only the parts whose path contains the
# text. The output of each part is in build/test-long/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
PART=${PART:-} LANES=${LANES:-1}
[[ $LANES =~ ^[1-9][0-9]*$ ]] || { echo "test-long: LANES must be a number from 1 up (got $LANES)" >&2; exit 1; }
export done_dir=build/test-long
mkdir -p "$done_dir"
read_state() {  # read_state PATHSPEC...: print a digest of these files
    { git ls-files -s -- "$@"; git diff -- "$@"; git ls-files -oz --exclude-standard -- "$@" | xargs -0r sha256sum; } \
        | sha256sum
}
documents=$(read_state .) state=$(read_state . ':!*.md')
export documents state
# Parts share servers' answers to requests that several parts send (test/served/conftest.py).
export SERVED=$PWD/$done_dir/served-${state%% *}
[[ -d $SERVED ]] || { rm -rf "$done_dir"/served-*; mkdir "$SERVED"; }

collected=$("$PYTHON" -m pytest --collect-only -q -m long) && status=0 || status=$?
if [[ $status != 0 && $status != 5 ]]; then  # 5: pytest found no test
    tail -n 25 <<<"$collected" >&2
    echo "test-long: pytest could not collect the tests: status $status" >&2; exit 1
fi
# Long parts first, so no lane ends with a long part alone: by the seconds of the last run, else by the number of tests.
mapfile -t parts < <(sed -n 's/::.*//p' <<<"$collected" | sort | uniq -c | while read -r count part; do
        seconds=$(sed -nE 's/^=.* in ([0-9]+)\..*=$/\1/p' "$done_dir/${part//\//_}.log" 2>/dev/null | tail -n 1)
        echo "${seconds:-$count} $part"
    done | sort -rn | awk '{print $2}' | grep -F -- "$PART" || true)
if [[ ${#parts[@]} -eq 0 ]]; then
    echo "test-long: PART must be a part of the path of a file with long tests (got '$PART')" >&2; exit 1; fi
echo "test-long: ${#parts[@]} parts: ${parts[*]}"

run_part() {
    local name=$done_dir/${1//\//_} begun=$SECONDS state=$state
    case $1 in test/docs/* | test/scripts/test_installed.py) state=$documents ;; esac
    if [[ -f $name.passed && $(<"$name.passed") == "$state" ]]; then echo "test-long: $1 passed before"; return; fi
    echo "test-long: $1"
    if "$PYTHON" -m pytest -m long --timeout 3600 "$1" >"$name.log" 2>&1; then echo "$state" >"$name.passed"
    else cat "$name.log"; echo "$1" >>"$done_dir/failed"; fi
    echo "test-long: $1: $((SECONDS - begun)) s: $(grep -E '^=+ .* =+$' "$name.log" | tail -n 1)"
}
export -f run_part
rm -f "$done_dir/failed"
printf '%s\n' "${parts[@]}" | xargs -P "$LANES" -I{} bash -c 'run_part {}'
if [[ -f $done_dir/failed ]]; then echo "test-long: failed: $(paste -sd ' ' "$done_dir/failed")" >&2; exit 1; fi
echo "test-long: all ${#parts[@]} parts passed"
