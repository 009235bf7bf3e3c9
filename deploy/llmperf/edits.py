"""Edit LLMPerf's sources: `python deploy/llmperf/edits.py DIRECTORY`.

Inter-token latency becomes that of AWS's patch for Neuron: the gaps after the first token over the output tokens less
one, where LLMPerf's own has the TTFT in it. `--tokenizer DIR` names the tokenizer that counts. Beyond that patch, each
request has the time of sending, prompts are made of the lines of $LLMPERF_LINES, and a request that failed is counted
instead of ending its thread.

Exit codes: 0; 2: a file is not LLMPerf's at the commit that run.sh names, or is edited already.
"""

from __future__ import annotations

import sys
from pathlib import Path

CLIENT = "src/llmperf/ray_clients/openai_chat_completions_client.py"
BENCHMARK = "token_benchmark_ray.py"
UTILS = "src/llmperf/utils.py"
LATENCY = "request_metrics[common_metrics.INTER_TOKEN_LAT] /="
GAPS = "max(1, num_output_tokens - 1)"
SECONDS = "request_metrics[common_metrics.E2E_LAT]"
EDITS = (
    (CLIENT, 1, "time_to_next_token.append(ttft)\n", "pass\n"),
    (
        CLIENT,
        1,
        'metrics[common_metrics.ERROR_MSG] = ""\n',
        'metrics[common_metrics.ERROR_MSG] = ""\n        metrics["timestamp_ms"] = round(1000 * time.time())\n',
    ),
    (BENCHMARK, 1, f"{LATENCY} request_metrics[common_metrics.NUM_OUTPUT_TOKENS]\n", f"{LATENCY} {GAPS}\n"),
    (BENCHMARK, 1, f"{LATENCY} num_output_tokens\n", f"{LATENCY} {GAPS}\n"),
    (BENCHMARK, 2, f"num_output_tokens / {SECONDS}\n", f"num_output_tokens / ({SECONDS} or 1)\n"),
    (BENCHMARK, 1, "import LlamaTokenizerFast\n", "import AutoTokenizer\n"),
    (
        BENCHMARK,
        1,
        'LlamaTokenizerFast.from_pretrained(\n        "hf-internal-testing/llama-tokenizer"\n    )',
        "AutoTokenizer.from_pretrained(args.tokenizer)",
    ),
    (
        BENCHMARK,
        1,
        'args.add_argument(\n    "--metadata",',
        'args.add_argument("--tokenizer", default="hf-internal-testing/llama-tokenizer")\n'
        'args.add_argument(\n    "--metadata",',
    ),
    (UTILS, 1, "import math\n", "import math\nimport os\n"),
    (UTILS, 1, "from transformers import LlamaTokenizerFast\n", ""),
    (
        UTILS,
        1,
        'tokenizer = LlamaTokenizerFast.from_pretrained(\n        "hf-internal-testing/llama-tokenizer")\n',
        "tokenizer = None\n",
    ),
    (
        UTILS,
        1,
        'sonnet_path = pathlib.Path(__file__).parent.resolve() / "sonnet.txt"\n',
        'sonnet_path = os.environ.get("LLMPERF_LINES") or pathlib.Path(__file__).parent.resolve() / "sonnet.txt"\n',
    ),
)
"""Edits as (file, number of places, text there, text that replaces it)."""


def main() -> int:
    """Apply all edits, or none; return the exit code that the module describes."""
    folder = Path(sys.argv[1])
    texts = {name: (folder / name).read_text(encoding="utf-8") for name, *_ in EDITS}
    for name, count, old, new in EDITS:
        if (found := texts[name].count(old)) != count:
            print(f"error: {folder / name} has {old.strip()!r} {found} times instead of {count}", file=sys.stderr)
            return 2
        texts[name] = texts[name].replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
