#!/bin/sh
# Measure all $ENDPOINTS on every test case of $CASES, and publish. Arguments are compare_architectures.py's; its exit code
# counts after what it measured is published: failed requests, and answers that differ by more than a near-tie.
set -u
results=${RESULTS:-/results}
for endpoint in $ENDPOINTS; do set -- "$@" "--endpoint=$endpoint"; done
for prompt in "${CASES:-/cases}"/*; do set -- "$@" "--dataset=$prompt"; done
code=0
rm -f "$results/results.json" # of an earlier run, where a claim keeps them
python3 compare_architectures.py "$@" "--output=$results" || code=$?
[ -e "$results/results.json" ] || exit "$code"
kept=$KEEP/measure-$(date -u +%Y%m%dT%H%M%SZ)
mkdir -p "$kept" && cp -r "$results/." "$kept/"
# shellcheck disable=SC2086  # several words
python3 "${SCRIPT:-/publish/publish.py}" "$results/results.json" $PUBLISH && exit "$code"
