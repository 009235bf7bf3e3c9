#!/bin/sh
# LLMPerf's token_benchmark_ray.py on every test case of $CASES, for each of $ENDPOINTS. Arguments are its own. It takes no
# prompts, but lines of its sonnet.txt: so a test case is that file with nothing but its line, as in AWS's sample.
set -eu
commit=f1d6bed47e4501b0e371082b41601b59ab55269f
home=${LLMPERF_HOME:-/cache}
source=$home/llmperf-$commit
if [ ! -e "$source" ]; then
    python3 -c 'import sys, tarfile, urllib.request as web
tarfile.open(fileobj=web.urlopen(sys.argv[1]), mode="r|gz").extractall(sys.argv[2], filter="data")' \
        "https://github.com/ray-project/llmperf/archive/$commit.tar.gz" "$home"
fi
if [ ! -e "$home/venv" ]; then # what it imports for this API; not its package, which Python 3.11 is too new for
    python3 -m venv "$home/venv"
    "$home/venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check ray==2.60.0 transformers==5.23.0 \
        pandas==3.1.1 tqdm==4.70.1 requests==2.34.2 boto3==1.44.5 pydantic==2.4.2
fi
export PYTHONPATH="$source/src" OPENAI_API_KEY="${OPENAI_API_KEY:-none}" RAY_USAGE_STATS_ENABLED=0
for prompt in "${CASES:-/cases}"/*; do
    yes "$(cat "$prompt")" | head -n 500 > "$source/src/llmperf/sonnet.txt"
    name=$(basename "$prompt" .txt)
    for endpoint in $ENDPOINTS; do
        echo "$name at $endpoint"
        OPENAI_API_BASE=${endpoint#*=} "$home/venv/bin/python" "$source/token_benchmark_ray.py" --llm-api=openai \
            "--model=$MODEL" "--results-dir=$home/results/${endpoint%%=*}/$name" "$@"
    done
done
