"""Command of `make claims`: measures five claims of this project, and prints pass or fail by thresholds set before.

It takes some twenty minutes on two cores that do nothing else. --small makes it minutes, to see that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from scripts.claims import plan
from scripts.claims.laws import texts_follow_the_law
from scripts.claims.servers import Starts
from scripts.claims.speed import never_slower
from scripts.claims.texts import drafts_change_no_text, failover_changes_no_text, starts_succeed
from scripts.claims.verdict import Verdict, page
from specdec.inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT
from specdec.inference.errors import SpecDecError
from specdec.inference.observe.host_load import load_average

NAMES = ("texts", "law", "speed", "failover", "starts")


def main(arguments: Sequence[str]) -> int:
    """Measure the claims; return 0 if none fails, else 1. Wrong flags exit with code 2."""
    args, load = _parser().parse_args(arguments), load_average()
    with tempfile.TemporaryDirectory(prefix="specdec-claims-") as directory:
        verdicts = asyncio.run(_verdicts(args, Path(directory)))
    text = page(verdicts, shlex.join(["python", "-m", "scripts.claims", *arguments]), load)
    if args.vllm:
        text += f"\n## Stock vLLM's own speculation\n\n{_of_vllm(args.vllm)}\n"
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")
    return int(any(each.holds is False for each in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.claims", description=__doc__)
    parser.add_argument("--small", action="store_true", help="few prompts, short answers: to see that it works")
    parser.add_argument("--only", type=lambda text: text.split(","), default=NAMES, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--page", type=Path, help="file to which the page is written, too")
    parser.add_argument("--url", help="another server of OpenAI's API, whose law is tested in place of ours")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="Python with vLLM: count the texts that its speculation changes"
    )
    return parser


async def _verdicts(args: argparse.Namespace, directory: Path) -> list[Verdict]:
    size, starts = plan.SMALL if args.small else plan.WHOLE, Starts()
    claims: dict[str, Callable[[], Awaitable[Verdict]]] = {
        "texts": lambda: drafts_change_no_text(size, starts, directory),
        "law": lambda: texts_follow_the_law(size, starts, args.url),
        "speed": lambda: asyncio.to_thread(never_slower, size, directory / "speed"),
        "failover": lambda: failover_changes_no_text(size, starts),
        "starts": lambda: starts_succeed(size, starts),  # last: it counts the others' starts
    }
    verdicts = []
    for name, claim in claims.items():
        if name in args.only:
            print(f"{name} ...", file=sys.stderr, flush=True)
            verdicts.append(await _judged(name, claim))
            print(f"{name}: {verdicts[-1].word}: {verdicts[-1].measured}", file=sys.stderr, flush=True)
    return verdicts


async def _judged(name: str, claim: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Return the verdict on a claim; if one of its servers fails, the verdict is that the claim fails."""
    try:
        return await claim()
    except SpecDecError as error:
        return Verdict(f"Claim {name}", " ".join(str(error).split()), holds=False)


def _of_vllm(python: str) -> str:
    """Run `benchmarks.same_text` with the bundled models, by a Python that has vLLM; return what it prints."""
    drafting = f'{{"method": "draft_model", "model": "{BUNDLED_DRAFT}", "num_speculative_tokens": 4}}'
    flags = ("--model", str(BUNDLED_TARGET), "--speculative_config", drafting)
    done = subprocess.run([python, "-m", "benchmarks.same_text", *flags], cwd=ROOT, capture_output=True, text=True)
    return "\n".join(line for line in (done.stdout or done.stderr[-2000:]).splitlines() if not line.startswith("{"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
