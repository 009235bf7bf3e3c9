"""Command of `make vllm-gpu-report`: what to measure first where vLLM has a GPU, on one page.

The command runs in vLLM's environment, on a CPU too. The first step is `benchmarks.same_text`. Every other one except
the choice of tokens is a race of `benchmarks.peers`, shape vllm, over some variants: this project's target over vLLM
beside vLLM itself. The page has the reason for each step or variant that cannot run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers.race import PLAIN
from benchmarks.report import machine
from scripts.device_report.steps import Step
from specdec.inference.observe.host_load import load_average

DRAFTED = ("1 worker, 0 ms", "draft_model 4", "draft_model 8")
SAME_TEXT = "The same text"
WAYS = {
    SAME_TEXT: (),
    "Price of synchronous scheduling": (PLAIN, "asynchronous"),
    "Widths and graphs": (PLAIN, "graphs", "graphs, 1 worker", *DRAFTED),
    "Choice of tokens": (),
    "Tensor parallel 2": (PLAIN, "tensor parallel 2"),
    "fp8": (PLAIN, "fp8"),
    "LoRA": (PLAIN, "LoRA"),
    "Hybrid model": (PLAIN,),
}
"""Ways to serve (variants of `benchmarks.peers`) that each step compares, by step, the most important step first."""
HYBRID = "Hybrid model"
MISSING = "vLLM is not installed in this environment (docs/vllm.md)"
NO_HEAD = '--speculative_config has no JSON of vLLM\'s, such as {"method": "eagle3", ...}, or --pair no target'
NO_PLUGIN = "vllm_same_text is not installed in this environment: pip install ./vllm_same_text"
NO_HYBRID = "--hybrid names no model with Mamba or gated delta layers, such as ibm-granite/granite-4.0-h-micro"


def main(arguments: Sequence[str]) -> int:
    """Run all steps, write the report and print it; return the exit code, 1 if a step failed, else 0."""
    args = parser().parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    done = []
    for step in steps(args):
        print(f"{step.title}: python -m {' '.join(step.arguments)}", file=sys.stderr, flush=True)
        done.append(step.run(args.output))
    head = ["# vLLM: what to measure first", "", f"{machine()}, load average {load_average():g} after it.", ""]
    page = "\n".join([*head, *(line for each in done for line in each.lines())])
    (args.output / "report.md").write_text(page, encoding="utf-8")
    print(page)
    return 0 if all(each.passed for each in done) else 1


def steps(args: argparse.Namespace) -> list[Step]:
    """Return all steps of the report; a step that cannot run here has the reason in `why_not`."""
    return [_step(title, ways, args) for title, ways in WAYS.items()]


def _step(title: str, ways: Sequence[str], args: argparse.Namespace) -> Step:
    if title == SAME_TEXT:
        return _same_text(args)
    if not ways:
        return Step(title, ("benchmarks.choice", "--vocab_size", str(args.vocab_size)))
    pair = f"{args.hybrid},{args.hybrid}" if title == HYBRID else args.pair
    load = ("--streams", args.streams, "--tokens", str(args.tokens), "--dtypes", args.dtype, "--num_prompts", "3")
    file = args.output / f"{title.lower().replace(' ', '_')}.json"
    chosen = [word for way in ways for word in ("--variant", way)]
    arguments = ("benchmarks.peers", str(file), "--shapes", "vllm", *load, *chosen, *(("--pair", pair) if pair else ()))
    why_not = MISSING if find_spec("vllm") is None else NO_HYBRID if title == HYBRID and not args.hybrid else ""
    return Step(title, arguments, why_not)


def _same_text(args: argparse.Namespace) -> Step:
    """Return the step that counts the texts which speculation changes with the plug-in `vllm_same_text`."""
    target, asked = (args.pair or "").partition(",")[0], args.speculative_config or ""
    arguments = ("--model", target, "--speculative_config", asked, "--dtype", args.dtype)
    has_plugin = any(each.name == "same_text" for each in entry_points(group="vllm.general_plugins"))
    why_not = MISSING if find_spec("vllm") is None else "" if has_plugin else NO_PLUGIN
    return Step(SAME_TEXT, ("benchmarks.same_text", *arguments), why_not or ("" if target and asked else NO_HEAD))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    built = argparse.ArgumentParser(prog="python -m scripts.device_report.vllm", description=__doc__)
    built.add_argument("--pair", metavar="TARGET,DRAFT", help="directories or hub ids (default: the bundled pair)")
    built.add_argument("--hybrid", metavar="MODEL", help="directory or hub id of a model of the last step")
    built.add_argument("--speculative_config", metavar="JSON", help="vLLM's own, of the first step: eagle3, mtp")
    built.add_argument("--dtype", default="float32", help="bfloat16 on a GPU (%(default)s)")
    built.add_argument("--streams", default="1,16", help="prompts at once (%(default)s)")
    built.add_argument("--tokens", type=int, default=64, help="of an answer (%(default)s)")
    built.add_argument("--vocab_size", type=int, default=151_936, help="of the choice of tokens (%(default)s)")
    default = Path("reports") / f"vllm_{time.strftime('%Y%m%d_%H%M%S')}"
    built.add_argument("--output", type=Path, default=default, metavar="DIR", help="default: reports/vllm_TIME")
    return built


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
