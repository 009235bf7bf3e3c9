#!/bin/sh
# LLMPerf on every test case of $CASES, for each of $ENDPOINTS. Arguments are its own. It takes no prompts, but lines of a
# text: so a test case is that text with nothing but its line, and the last case is its own text, sonnets by Shakespeare:
# both as in AWS's sample. What a run measured is kept and published at once; a run that failed, or was not published,
# fails the Job at the end.
set -eu
home=${LLMPERF_HOME:-/cache}
results=$home/results/llmperf-$(date -u +%Y%m%dT%H%M%SZ)
code=0
for prompt in "${CASES:-/cases}"/* shakespeare; do
    lines=
    [ "$prompt" = shakespeare ] || { lines=$home/lines.txt && yes "$(cat "$prompt")" | head -n 500 > "$lines"; }
    name=$(basename "$prompt" .txt)
    for endpoint in $ENDPOINTS; do
        variant=${endpoint%%=*}
        echo "$name at $endpoint"
        if LLMPERF_HOME=$home LLMPERF_LINES=$lines OPENAI_API_BASE=${endpoint#*=} "${LLMPERF:-/llmperf}/run.sh" \
            "--model=$MODEL" "--results-dir=$results/$variant/$name" "--metadata=variant=$variant,test_case=$name" "$@"; then
            # shellcheck disable=SC2086  # several words
            "$home/venv/bin/python" "${SCRIPT:-/publish/publish.py}" "$results/$variant/$name" $PUBLISH || code=$?
        else
            code=1
        fi
        [ ! -e "$results/$variant/$name" ] || { mkdir -p "$KEEP/${results##*/}/$variant" &&
            cp -r "$results/$variant/$name" "$KEEP/${results##*/}/$variant/"; } || code=1
    done
done
exit "$code"
