"""Command: `python -m vllm_same_text check` reads the installed vLLM, and `... prove URL URL2` compares two servers."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from vllm_same_text import SPECULATE, place, unknown

PROMPTS = ("The quick brown fox", "1, 2, 3, 4, 5, 6,", "Once upon a time", "def f(x):")
MODES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "logit_bias": {"5": 3.0, "7": -4.0}, "min_tokens": 4},
)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
COUNTER = "vllm:spec_decode_num_accepted_tokens_total"


def check() -> str | None:
    """Print what this vLLM has of what the rule needs; return what it lacks, or None."""
    if (folder := place()) is None:
        return "vLLM is not installed in this Python's environment"
    from vllm.version import __version__

    drafters = sorted((folder / SPECULATE).glob("*/speculator.py"))
    shared = [file.parent.name for file in drafters if ".sample_draft(" in file.read_text(encoding="utf-8")]
    print(f"vLLM {__version__} in {folder}; runner V2 is needed, VLLM_USE_V2_MODEL_RUNNER is {os.environ.get(RUNNER)}")
    print(f"drafts with the target's noise: {', '.join(shared)} and what extends these; greedy drafts: all others")
    return f"this vLLM lacks {missing}" if (missing := ", ".join(unknown())) else None


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Return a server's answer; end the program with the server's reason if it has none."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    request = Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        return bytes(urlopen(request, timeout=600).read())
    except OSError as error:  # urllib's errors are; one of HTTP has the server's reason
        sys.exit(f"{url}: {error} {error.read().decode() if isinstance(error, HTTPError) else ''}")


def texts(url: str, num_tokens: int) -> tuple[list[list[int]], float]:
    """Return a server's tokens for each mode and prompt, and how many draft tokens it has accepted since its start."""
    ends = {"model": json.loads(call(f"{url}/v1/models"))["data"][0]["id"], "max_tokens": num_tokens}
    bodies = [
        {**ends, **mode, "prompt": prompt, "seed": number, "ignore_eos": True, "return_token_ids": True}
        for number, (mode, prompt) in enumerate((mode, prompt) for mode in MODES for prompt in PROMPTS)
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: json.loads(call(f"{url}/v1/completions", body)), bodies))
    counts = [line.split()[-1] for line in call(f"{url}/metrics").decode().splitlines() if line.startswith(COUNTER)]
    return [answer["choices"][0]["token_ids"] for answer in answers], sum(map(float, counts))


def prove(urls: list[str], num_tokens: int) -> str | None:
    """Print how many tokens of two servers differ; return what speaks against equal texts, or None."""
    (first, accepted), (second, also) = (texts(url.rstrip("/"), num_tokens) for url in urls)
    wrong = sum(a != b for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))
    print(f"{wrong} of {sum(map(len, first))} tokens differ; accepted draft tokens: {accepted:g} and {also:g}")
    return f"{wrong} tokens differ" if wrong else None if accepted or also else "neither server has accepted a draft"


def main() -> None:
    parser = ArgumentParser("python -m vllm_same_text", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="read the installed vLLM; no device is needed")
    proof = commands.add_parser("prove", help="compare seeded texts of two servers, one of them without speculation")
    proof.add_argument("urls", nargs=2, metavar="URL", help="as http://127.0.0.1:8000; OPENAI_API_KEY is sent if set")
    proof.add_argument("--tokens", type=int, default=128, help="tokens of each of the 24 texts")
    asked = parser.parse_args()
    sys.exit(check() if asked.command == "check" else prove(asked.urls, asked.tokens))


if __name__ == "__main__":
    main()
