#!/bin/sh
# LLMPerf's token_benchmark_ray.py against $OPENAI_API_BASE; arguments are its own, and --tokenizer. The first call
# installs it below $LLMPERF_HOME: its sources at one commit, edited by edits.py, and Python 3.10, since it refuses 3.11.
# Without python3.10 on this machine, uv brings one. $LLMPERF_LINES is a text whose lines prompts are made of.
set -eu
here=$(dirname "$0")
commit=f1d6bed47e4501b0e371082b41601b59ab55269f
home=${LLMPERF_HOME:-$HOME/.cache/llmperf}
source=$home/llmperf-$commit
if [ ! -e "$home/.installed" ]; then
    rm -rf "$source" "$home/venv" # of a first call that did not end
    mkdir -p "$home"
    python3 -c 'import sys, tarfile, urllib.request as web
tarfile.open(fileobj=web.urlopen(sys.argv[1]), mode="r|gz").extractall(sys.argv[2], filter="data")' \
        "https://github.com/ray-project/llmperf/archive/$commit.tar.gz" "$home"
    python3 "$here/edits.py" "$source"
    if command -v python3.10 > /dev/null; then
        python3.10 -m venv "$home/venv"
    else
        python3 -m venv "$home/uv"
        "$home/uv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
        "$home/uv/bin/uv" venv --quiet --seed --python 3.10 "$home/venv"
    fi
    # Its package as it is; of its dependencies those that it imports for this API, and what publish.py needs.
    "$home/venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check ray==2.60.0 transformers==5.20.2 \
        pandas==2.3.3 tqdm==4.70.1 requests==2.34.2 pydantic==2.4.2 boto3==1.44.5
    "$home/venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check --no-deps --editable "$source"
    touch "$home/.installed"
fi
export OPENAI_API_KEY="${OPENAI_API_KEY:-none}" RAY_USAGE_STATS_ENABLED=0
exec "$home/venv/bin/python" "$source/token_benchmark_ray.py" --llm-api openai "$@"
