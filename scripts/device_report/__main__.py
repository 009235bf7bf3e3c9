"""Command of `make trainium-report` and `make gpu-report`: measures a target without and with its draft on a device.

With --device the torch backend computes there, and its own tests and benchmarks run first. One server runs at a time,
since on most instances each takes every core. The support bundle is written even if a server failed, because then it is
needed most.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.device_report.bundle import write_bundle
from scripts.device_report.steps import STEPS, Done, require_device
from scripts.device_report.tables import report
from scripts.device_report.variant import Variant
from specdec.comparison.plan.flags import BUNDLED_PROMPT_FILES
from specdec.inference.cli.roles.registry import parser_of
from specdec.inference.config import DEFAULT_START_TIMEOUT_S
from specdec.inference.errors import ConfigError, SpecDecError


def main(arguments: Sequence[str]) -> int:
    """Run the report; return 0, or 1 if a server or a request failed. Wrong flags exit with code 2."""
    args = _parse(arguments)
    output: Path = args.output
    failure = None
    variants = _variants(args)
    try:
        steps = _steps_done(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_measure_all(args, variants))
    except SpecDecError as error:
        failure = str(error)
        print(f"error: {failure}", file=sys.stderr)
    text = report(variants, failure, steps)
    (output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"send this file with a report of a fault: {write_bundle(output, variants, _files(args))}")
    failed = any(variant.failures for variant in variants) or not all(done.passed for done in steps)
    return 1 if failure or failed else 0


def _steps_done(args: argparse.Namespace) -> list[Done]:
    """Run the device's own tests and benchmarks; return their results, none without --device.

    Raises:
        ConfigError: torch cannot compute on the device that --device names.
    """
    if args.device is not None:
        require_device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    done = []
    for step in STEPS[args.device](args.target_model) if args.device else ():
        print(f"{step.title}: python -m {' '.join(step.arguments)}", file=sys.stderr, flush=True)
        done.append(step.run(args.output))
    return done


async def _measure_all(args: argparse.Namespace, variants: Sequence[Variant]) -> None:
    for variant in variants:
        print(f"{variant.name}: main.py {' '.join(variant.arguments)}", file=sys.stderr, flush=True)
        await variant.measure(_load(args), args.output, start_timeout_s=args.start_timeout_s)


def _load(args: argparse.Namespace) -> list[str]:
    """Return the comparison's flags that say which requests are sent."""
    values = {
        "tokenizer": args.target_model,
        "input_tokens": args.prompt_tokens,
        "max_new_tokens": args.output_tokens,
        "num_prompts": args.num_requests,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "deadline_s": args.deadline_s,
    }
    files = [f"--prompt_file={file}" for file in args.prompt_file or BUNDLED_PROMPT_FILES]
    return [*files, *(f"--{name}={value}" for name, value in values.items()), "--ignore_eos", "--num_runs=1"]


def _variants(args: argparse.Namespace) -> list[Variant]:
    """Return the two servers to measure, without and with a draft; wrong flags of theirs end the program here.

    Neither caches prefixes: a compiled graph of both models cannot, and the warm-up sends a prompt that is measured
    later.
    """
    shared = _configured(args.config, args)
    baseline = args.baseline_model or args.target_model
    alone = ("target", [*_configured(args.baseline_config or args.config, args), "--model", baseline, "--gamma", "0"])
    models = ["--target_model", args.target_model, "--draft_model", args.draft_model]
    pair = ("fused_target", [*shared, *models, "--drafting", "always"])
    variants = []
    for name, (role, flags) in zip(("without a draft", "with a draft"), (alone, pair), strict=True):
        parsed = parser_of(role).parse_args(flags)
        variants.append(Variant(name, role, tuple(flags), parsed.compiled_model_path))
    return variants


def _files(args: argparse.Namespace) -> list[Path]:
    return [*(args.config or []), *(args.baseline_config or [])]


def _configured(files: Sequence[Path] | None, args: argparse.Namespace) -> list[str]:
    device = [] if args.device is None else ["--backend=torch", f"--device={args.device}"]
    return [*(f"--config={file}" for file in files or []), "--no-prefix_caching", *device, *args.server_flags]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command's own flags; those after `--`, for both servers, become `server_flags`."""
    where = [*arguments, "--"].index("--")
    args = parser().parse_args(arguments[:where])
    args.server_flags = list(arguments[where + 1 :])
    args.output = args.output or Path("reports") / f"{args.device or 'trainium'}_{time.strftime('%Y%m%d_%H%M%S')}"
    return args


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags."""
    built = argparse.ArgumentParser(
        prog="python -m scripts.device_report", description=__doc__, epilog="After --: flags of both servers (main.py)."
    )
    text = "compute with backend torch on this device, after its steps; without it the servers' flags decide"
    built.add_argument("--device", choices=sorted(STEPS), help=text)
    built.add_argument("--target_model", required=True, metavar="DIR", help="directory or hub id")
    built.add_argument("--draft_model", required=True, metavar="DIR", help="directory or hub id")
    built.add_argument("--config", type=Path, action="append", metavar="FILE", help="for both servers, in configs/")
    text = "another target to run without a draft, such as one in bfloat16; its tokenizer must be the same"
    built.add_argument("--baseline_model", metavar="DIR", help=text)
    built.add_argument("--baseline_config", type=Path, action="append", metavar="FILE", help="instead of --config")
    built.add_argument("--output", type=Path, metavar="DIR", help="default: reports/DEVICE_TIME")
    built.add_argument("--prompt_file", type=Path, action="append", metavar="FILE", help="one kind of prompts each")
    built.add_argument("--prompt_tokens", type=int, default=128, metavar="N", help="length of prompts (%(default)s)")
    built.add_argument("--output_tokens", type=int, default=512, metavar="N", help="length of answers (%(default)s)")
    built.add_argument("--num_requests", type=int, default=10, metavar="N", help="prompts of each kind (%(default)s)")
    built.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="clients, each with two requests (%(default)s)"
    )
    built.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    built.add_argument("--deadline_s", type=float, default=1200.0, help="limit of a request (%(default)s)")
    built.add_argument(
        "--start_timeout_s", type=float, default=DEFAULT_START_TIMEOUT_S, help="compiling included (%(default)s)"
    )
    return built


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
