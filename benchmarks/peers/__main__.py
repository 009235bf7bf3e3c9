"""Our decoding against other programs: `make bench-peers`, or `python -m benchmarks.peers [--shapes bundled,110M,1B]`.

Each program runs in a process of its own, with one thread. All get the same prompts as token ids, at once where there
are several streams, and decode the same number of tokens, greedily, never stopping early. Variants take turns. Figures
are medians over prompts. A program that cannot be installed, or does not load a model, is skipped by name.

Shapes vllm, vllm-110M, serve and serve-defaults race against vLLM itself, over HTTP and in vLLM's environment (`make
bench-vllm`): the first two with our target over vLLM, the others with vLLM's own server and a pool of draft workers
beside it. OpenVINO GenAI and llama.cpp are installed and built under build/peers, once (some twenty minutes).
docs/peers.json gets the figures, and keeps those of other shapes, arithmetics and numbers of streams.
`python -m benchmarks.page` makes docs/measurements/peers.md and vllm.md of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.decoding import encode_all, read_prompts
from benchmarks.peers.beside_vllm import WAYS
from benchmarks.peers.child import Setup
from benchmarks.peers.engine import BESIDE_VLLM, OURS, OVER_VLLM, PEERS, Engine, Peer
from benchmarks.peers.environment import FOLDER, UnavailableError
from benchmarks.peers.race import Plan, race
from benchmarks.peers.tables import (
    FILE,
    SERVE,
    SERVE_DEFAULTS,
    VLLM,
    VLLM_110M,
    goals_of,
    joined,
    rates_table,
    thirds_table,
)
from benchmarks.peers.walk import DRAFTS, walking_pair
from benchmarks.report import machine, print_json, print_table, write
from benchmarks.wide_heads import widen
from specdec.comparison.report.markdown import commit
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET
from specdec.inference.observe.host_load import load_average
from specdec.inference.serving.hub import is_hub_id, model_directory

PLANS = {
    "bundled": Plan(num_tokens=96, num_rounds=2),
    "110M": Plan(num_tokens=48, num_rounds=1),
    "1B": Plan(num_tokens=16, num_rounds=1, num_streams=(1, 4)),
    VLLM: Plan(num_tokens=64, num_rounds=3),
    VLLM_110M: Plan(num_tokens=48, num_rounds=2),
    **dict.fromkeys((SERVE, SERVE_DEFAULTS), Plan(num_tokens=64, num_rounds=3, num_streams=(1, 4, 16, 64))),
}
OF_VLLM = {VLLM: OVER_VLLM, VLLM_110M: OVER_VLLM, SERVE: BESIDE_VLLM, SERVE_DEFAULTS: BESIDE_VLLM}
"""Programs that are compared, by shape (kind of models), for the shapes that run in vLLM's environment."""
USUAL = {
    VLLM_110M: ["plain", "draft_model 4", "draft_model 8", *(f"1 worker, {rtt_ms} ms" for rtt_ms in (0, 10, 50))],
    SERVE: [*WAYS][: len(WAYS) // 2],
    SERVE_DEFAULTS: [*WAYS][len(WAYS) // 2 :],
}
"""Variants that run by default, by shape (kind of models), where some are left out.

A small machine has memory for half of the servers at a time, and prompt lookup finds nothing in the text of random
weights.
"""
DTYPES = ("float32", "int8")
LENGTH = 256
"""Most tokens of a prompt and its answer together."""
LOOKUP = "prompt lookup"
"""Name of the variant that is left out for models of random weights, because their text never repeats a token."""
BYTES = {"float32": 4, "int8": 1}


def main() -> None:
    args = _parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    content = json.loads(args.file.read_text(encoding="utf-8")) if args.file.exists() else {}
    for shape in args.shapes.split(","):
        _measure(shape, args, content)
    print_json("peers", content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="what is written (%(default)s)")
    parser.add_argument("--shapes", default="bundled,110M", help=f"of {', '.join(PLANS)} (%(default)s)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="%(default)s")
    parser.add_argument("--peers", default=",".join(peer.name for peer in (*PEERS, *OVER_VLLM)), help="%(default)s")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME", help="of vLLM's shapes (default: usual ones)"
    )
    parser.add_argument(
        "--pair", metavar="TARGET,DRAFT", help="models of vLLM's shapes (default: bundled, with wider heads)"
    )
    parser.add_argument("--num_prompts", type=int, default=6, help="of one stream (%(default)s)")
    parser.add_argument("--tokens", type=int, help="of an answer (default: by shape)")
    parser.add_argument("--streams", help="prompts at once, one number or several with commas (default: by shape)")
    parser.add_argument("--rounds", type=int, help="over all prompts (default: by shape)")
    parser.add_argument(
        "--neighbours", type=int, default=0, help="busy processes in the middle third of the rounds (%(default)s)"
    )
    return parser


def _measure(shape: str, args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Measure all programs with one shape of models; after each dtype, add results to `content` and write the file."""
    plan = PLANS[shape]
    counts = tuple(map(int, args.streams.split(","))) if args.streams else plan.num_streams
    plan = Plan(args.tokens or plan.num_tokens, args.rounds or plan.num_rounds, counts, args.neighbours)
    found: dict[str, Any] = {
        "command": shlex.join(
            ["python", "-m", "benchmarks.peers", *(each for each in sys.argv[1:] if each != str(args.file))]
        ),
        "commit": commit(),
        "load_before": load_average(),
        "machine": machine(),
        "versions": {},
        "plan": asdict(plan) | {"num_prompts": args.num_prompts},
        "skipped": {},
        "rows": [],
    }
    earlier = content.get(shape, [])
    for dtype in args.dtypes.split(","):
        _race_in(dtype, shape, plan, args, found)
        content[shape] = joined(earlier, found)
        write(content, args.file)
    print_table(shape, *rates_table(found["rows"]))
    print_table(f"{shape}, ours against each peer's", *goals_of(shape)(found["rows"]))
    if args.neighbours:
        print_table(f"{shape}, over plain before, beside and after the neighbours", *thirds_table(found["rows"]))


def _race_in(dtype: str, shape: str, plan: Plan, args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Measure all programs in one dtype; add results, the programs' versions and the skipped programs to `content`."""
    target, draft = _pair(shape, args.pair)
    prompts = encode_all(_prompts(max(args.num_prompts, *plan.num_streams)), target)
    peers = OF_VLLM.get(shape, PEERS)
    wanted = args.variant or USUAL.get(shape, [])
    skipped: dict[str, str] = content["skipped"]
    with ExitStack() as stack:
        engines = []
        for peer in peers:
            if dtype not in peer.dtypes:
                continue
            if peer.name not in (OURS, *args.peers.split(",")):
                skipped[f"{peer.name} ({dtype})"] = "left out by --peers"
                continue
            folder = FOLDER / "models" / shape / peer.module
            shared = (wanted, len(peers) * len(wanted))
            setup = Setup(str(target), str(draft), dtype, str(folder), max(plan.num_streams), LENGTH, *shared)
            try:
                engines.append(_started(peer, setup, shape))
            except UnavailableError as reason:
                skipped[f"{peer.name} ({dtype})"] = str(reason)
                print(f"SKIPPED: {peer.name} ({dtype}): {reason}", flush=True)
                continue
            stack.callback(engines[-1].close)
        content["versions"] |= {name: each for engine in engines for name, each in engine.versions.items()}
        unknown = set(wanted).difference(*(engine.variants for engine in engines))
        if unknown and len(engines) == len(peers):
            sys.exit(f"--variant: none of {', '.join(peer.name for peer in peers)} has {', '.join(sorted(unknown))}")
        rows, failures = race(engines, prompts, plan, dtype, args.num_prompts)
    skipped.update(failures)
    print(*(f"SKIPPED: {name}: {reason}" for name, reason in failures.items()), sep="\n", flush=True)
    content["rows"] += [asdict(row) for row in rows]


def _pair(shape: str, named: str | None) -> tuple[Path, Path]:
    """Return the directories of the target and the draft of a shape; make models that are missing.

    Args:
        named: "TARGET,DRAFT" to use instead, for shapes that are measured with vLLM; None or "" for the shape's own.
    """
    if shape in DRAFTS:
        return walking_pair(shape, FOLDER / "models")
    if shape not in OF_VLLM:
        return BUNDLED_TARGET, BUNDLED_DRAFT
    if named:
        target, draft = (model_directory(each) if is_hub_id(each) else Path(each) for each in named.split(","))
        return target, draft
    given, folder = (BUNDLED_TARGET, BUNDLED_DRAFT), FOLDER / "models" / VLLM
    if shape == VLLM_110M:
        given, folder = walking_pair("110M", FOLDER / "models"), FOLDER / "models" / shape
    pair = folder / "target", folder / "draft"
    for wide, narrow in zip(pair, given, strict=True):
        if not wide.exists():
            widen(narrow, wide)
    return pair


def _started(peer: Peer, setup: Setup, shape: str) -> Engine:
    """Start a program's process, and load its models; return it.

    Raises:
        UnavailableError: the program fails to start, or this machine lacks the memory.
    """
    weights = sum(file.stat().st_size for file in Path(setup.target).glob("*.safetensors"))
    if shape in DRAFTS:  # the bundled pair fits anywhere
        require_memory(peer.copies * weights * BYTES[setup.dtype] // BYTES["float32"])
    print(f"{peer.name} ({setup.dtype}, {shape}): loading", flush=True)
    engine = Engine(peer, setup)
    if shape in DRAFTS:
        engine.variants = [variant for variant in engine.variants if variant != LOOKUP]
    return engine


def require_memory(num_bytes: int) -> None:
    """Raise UnavailableError if less memory is available; file caches of Linux count as available."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    free = int(found[1]) * 1024 if found else 0
    if num_bytes > free:
        raise UnavailableError(f"its weights need {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


def _prompts(count: int) -> list[str]:
    """Return `count` prompts: the demo's, then structured and open-ended ones in turn, then all of them again."""
    kinds = [read_prompts(BUNDLED_PROMPTS.with_name(f"{kind}.txt"), count) for kind in ("structured", "open_ended")]
    prompts = [*read_prompts(BUNDLED_PROMPTS, count), *itertools.chain(*zip(*kinds, strict=True))]
    return list(itertools.islice(itertools.cycle(prompts), count))


if __name__ == "__main__":
    main()
