"""Answers to real JSON schemas: each schema is sent to a fused server over HTTP, and each answer is checked against it.

FOLDER has JSON files, such as the sets of JSONSchemaBench (https://github.com/guidance-ai/jsonschemabench, data/);
--count files of each of its subfolders are drawn. Each schema is sent with and without `strict: true`, once per seed at
temperature 1. An answer that the limit of tokens cut is counted, not checked. A duplicate key in an object breaks the
promise of a strict schema; other schemas allow it for keys that they do not name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import httpx
from jsonschema import FormatChecker, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry

from specdec.inference.config import ROOT
from specdec.inference.serving.processes import free_port, server_process
from specdec.inference.text.json_schema import FORMATS
from tests.support.servers import until_healthy
from tests.support.trial import Trial, run

PARALLEL = 8
LIMIT_S = 3600.0
PROMPT = "A document in JSON:"


@dataclass
class Tally:
    """Number of requests by outcome for one setting of `strict`, and the wrong answers.

    Attributes:
        taken: files with schemas that the server accepted.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    taken: set[Path] = field(default_factory=set)


def faults(schema: dict[str, Any], text: str) -> Iterator[str]:
    """Yield "duplicate" if an object of the answer has a key twice, and "invalid" if the answer breaks the schema."""
    repeated: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    answer = json.loads(text, object_pairs_hook=keep)
    if repeated:
        yield "duplicate"
    rules, formats = validator_for(schema), FormatChecker(())
    formats.checkers = {name: rule for name, rule in rules.FORMAT_CHECKER.checkers.items() if name in FORMATS}
    try:
        rules(schema, format_checker=formats, registry=Registry()).validate(answer)
    except ValidationError as exc:
        yield f"invalid: {exc.message[:200]}"


@lru_cache(maxsize=PARALLEL)
def read(file: Path) -> dict[str, Any]:
    """Return the schema of a file."""
    schema: dict[str, Any] = json.loads(file.read_bytes())
    return schema


async def ask(client: httpx.AsyncClient, file: Path, seed: int, tally: Tally, *, strict: bool, num_tokens: int) -> None:
    """Send one request, again if the server is busy, and count its outcome."""
    schema = read(file)
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}
    body = {"prompt": PROMPT, "response_format": format_, "seed": seed, "temperature": 1, "max_tokens": num_tokens}
    while (answer := await client.post("/v1/completions", json=body)).status_code == 429:
        tally.ends["busy, asked again"] += 1
        await asyncio.sleep(float(answer.headers["retry-after"]))
    if answer.status_code != 200:
        tally.ends[f"HTTP {answer.status_code}"] += 1
        return
    tally.taken.add(file)
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] != "stop":
        tally.ends["cut"] += 1
        return
    found = [*faults(schema, choice["text"])]
    tally.ends["whole"] += 1
    tally.ends.update(each.split(":")[0] for each in found)
    tally.wrong += [f"{file.parent.name}/{file.name} seed {seed}: {each}: {choice['text'][:300]}" for each in found]


def drawn(folder: Path, count: int, seed: int) -> list[Path]:
    """Draw `count` JSON files of each folder below `folder`; return them in the order of sending."""
    folders = sorted({file.parent for file in folder.rglob("*.json")})
    chosen = []
    for each in folders:
        files = sorted(each.glob("*.json"))
        chosen += random.Random(seed).sample(files, min(count, len(files)))
    return chosen


async def schemas(trial: Trial, *, args: argparse.Namespace) -> None:
    files = drawn(args.folder, args.count, args.seed)
    trial.note(f"{len(files)} schemas, seed {args.seed}")
    tallies = {"as it is": Tally(), "strict": Tally()}
    work = [(file, name, seed) for file in files for name in tallies for seed in range(args.seeds)]
    left = iter(enumerate(work))

    async def visit(client: httpx.AsyncClient) -> None:
        for number, (file, name, seed) in left:
            trial.say(f"request {number} of {len(work)}")
            tally, strict = tallies[name], name == "strict"
            if seed == 0 or file in tally.taken:
                await ask(client, file, seed, tally, strict=strict, num_tokens=args.tokens)

    port, http_port = free_port(), free_port()
    flags = ("--port", str(port), "--http_port", str(http_port), "--threads", "1", "--batch", str(PARALLEL))
    async with server_process("fused", "fused_target", *flags, port=port):
        await until_healthy(http_port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=600) as client:
            await asyncio.gather(*(visit(client) for _ in range(PARALLEL)))
    for name, tally in tallies.items():
        judge(trial, name, tally, len(files))


def judge(trial: Trial, name: str, tally: Tally, num_files: int) -> None:
    """Add the promises about answers with one setting of `strict` to the suite's verdict."""
    ends = tally.ends
    trial.promise(f"{name}: schemas taken", f"{len(tally.taken)} of {num_files}", "> 0", kept=bool(tally.taken))
    trial.promise(f"{name}: whole answers that break their schema", f"{ends['invalid']} of {ends['whole']}", 0,
                  kept=not ends["invalid"])  # fmt: skip
    limit = 0 if name == "strict" else "-"
    trial.promise(f"{name}: with a key twice", ends["duplicate"], limit, kept=limit == "-" or not ends["duplicate"])
    trial.promise(f"{name}: failures of the server", ends["HTTP 500"], 0, kept=not ends["HTTP 500"])
    trial.results[name] = {"ends": dict(sorted(ends.items())), "wrong": tally.wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "tests" / "deploy" / "schemas"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="of schemas (%(default)s)")
    parser.add_argument("--count", type=int, default=60, help="of each subfolder (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="answers to each schema (%(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="limit of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    args = parser.parse_args()
    return run("schemas", partial(schemas, args=args), limit_s=LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
