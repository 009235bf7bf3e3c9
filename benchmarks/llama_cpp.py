"""Our decoding against llama.cpp's, greedy, same pair, prompts and number of tokens: `python -m benchmarks.llama_cpp`.

llama.cpp runs as its own programs on GGUF files that are made here, in float32 and in q8_0, with its defaults otherwise
(keys and values in float16). Rates are those of decoding alone, the prompt is read before: llama.cpp's as its programs
print them, the plain one without its sampling. Variants take turns; the best round of each prompt counts. Ours are
compared with llama.cpp's best rate in as many bits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.decoding import decode, encode_all, load_model, read_prompts
from benchmarks.llama_build import built_programs
from benchmarks.llama_gguf import write_gguf
from benchmarks.report import print_json, print_table
from inference.config import BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_TARGET, FUSED_GAMMA, ROOT
from inference.model.decoder import Decoder
from inference.model.slots import Backend
from inference.scheduling.draft_length import DraftLength
from inference.speculation.model_proposer import ModelProposer
from inference.speculation.slot_decoder import SlotDecoder
from inference.speculation.speculative_decoder import SpeculativeDecoder
from inference.text.tokenizer import Tokenizer

BUILD_FOLDER = ROOT / "build" / "llamacpp"
LLAMA_P_MIN = "0.75"
"""At which probability of its draft llama.cpp stops drafting, if it is told nothing else."""
GREEDY = ("--temp", "0", "--top-k", "1", "--samplers", "top_k")
PLAIN_RATE = re.compile(r"eval time =\s+([\d.]+) ms /\s+(\d+) runs")
SPECULATIVE_RATE = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
NUM_ACCEPTED = re.compile(r"n_accept\s+= (\d+)")
LOG_LINE = re.compile(r"^\d+\.\d+\.\d+\.\d+ [A-Z] ", re.MULTILINE)
ATTEMPTS = 10
"""Their log is lost now and then when the program ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once; `text` begins with the prompt."""

    seconds_per_token: float
    text: str
    tokens_per_pass: float = 1.0


Variant = Callable[[int], Run]
"""Index of a prompt -> its run."""


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    prompts = read_prompts(args.prompts, args.num_prompts)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        variants: dict[str, Variant] = {}
        for file_type in args.file_types.split(","):
            variants |= _llama_variants(args, prompts, Path(folder), file_type)
        variants |= _our_variants(args, prompts)
        best = _race(variants, len(prompts), args.rounds)
    _report(args, prompts, best)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__)
    parser.add_argument(
        "--build", type=Path, default=BUILD_FOLDER, help="where llama.cpp is, or gets built (%(default)s)"
    )
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT)
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="one per line")
    parser.add_argument("--num_prompts", type=int, default=6, help="the file's first ones (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt (%(default)s)")
    parser.add_argument("--gammas", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16])
    parser.add_argument("--file_types", default="f32,q8_0", help="of llama.cpp (%(default)s)")
    parser.add_argument("--dtypes", default="float32,int8", help="of our backend (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    return parser


def _llama_variants(
    args: argparse.Namespace, prompts: Sequence[str], folder: Path, file_type: str
) -> dict[str, Variant]:
    programs = built_programs(args.build)
    files = {name: folder / f"{name}-{file_type}.gguf" for name in ("target", "draft")}
    write_gguf(args.target, files["target"], file_type)
    write_gguf(args.draft, files["draft"], file_type)
    common = ["-m", str(files["target"]), "-t", str(args.threads), "-c", "512", "-n", str(args.tokens), *GREEDY]
    plain = [str(programs["llama-completion"]), *common, "-no-cnv", "--perf", "--simple-io"]
    variants: dict[str, Variant] = {
        f"llama.cpp {file_type} target-only": lambda i: _run_plain([*plain, "-p", prompts[i]])
    }
    speculative = [str(programs["llama-speculative-simple"]), *common, "-md", str(files["draft"])]
    lengths = {f"gamma {gamma}": (gamma, "0") for gamma in args.gammas}
    lengths[f"up to {FUSED_GAMMA}, {LLAMA_P_MIN}"] = FUSED_GAMMA, LLAMA_P_MIN
    for name, (gamma, p_min) in lengths.items():
        command = [*speculative, "--spec-type", "draft-simple"]
        command += ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", p_min]
        variants[f"llama.cpp {file_type} speculative, {name}"] = partial(_run_speculative, command, prompts)
    return variants


def _run_plain(command: Sequence[str]) -> Run:
    output, figures = _output(command, PLAIN_RATE)
    milliseconds, num_tokens = figures.groups()
    return Run(float(milliseconds) / 1e3 / int(num_tokens), LOG_LINE.split(output)[0].strip())


def _run_speculative(command: Sequence[str], prompts: Sequence[str], index: int) -> Run:
    output, figures = _output([*command, "-p", prompts[index]], SPECULATIVE_RATE)
    num_tokens, seconds = int(figures[1]), float(figures[2])
    accepted = NUM_ACCEPTED.search(output)
    num_passes = num_tokens - int(accepted[1]) if accepted else num_tokens
    text = LOG_LINE.split(output)[0].strip().removeprefix("<|bos|>")
    return Run(seconds / num_tokens, text, num_tokens / num_passes)


def _output(command: Sequence[str], wanted: re.Pattern[str]) -> tuple[str, re.Match[str]]:
    """What a program prints: text and log, and the figures in it."""
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            [*command, "--log-colors", "off"], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        figures = wanted.search(done.stdout + done.stderr)
        if figures:
            return done.stdout + done.stderr, figures
    raise SystemExit(f"{' '.join(command)} printed no figures:\n{done.stderr[-2000:]}")


def _our_variants(args: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for dtype in args.dtypes.split(","):
        target, draft = (
            load_model(path, backend="auto", dtype=dtype, threads=args.threads) for path in (args.target, args.draft)
        )
        run = partial(_run_ours, args, encode_all(prompts, args.target), [target, draft])
        name = f"ours {dtype}"
        variants[f"{name} target-only"] = partial(run, SlotDecoder(target), 0)
        for gamma in args.gammas:
            fused = SpeculativeDecoder(SlotDecoder(target), ModelProposer(draft))
            variants[f"{name} fused, gamma {gamma}"] = partial(run, fused, gamma)
        adaptive = SpeculativeDecoder(SlotDecoder(target), ModelProposer(draft), DraftLength())
        variants[f"{name} fused, as many as pay"] = partial(run, adaptive, FUSED_GAMMA)
    return variants


def _run_ours(
    args: argparse.Namespace,
    prompts: Sequence[list[int]],
    models: Sequence[Backend],
    decoder: Decoder,
    gamma: int,
    index: int,
) -> Run:
    """Decode behind a prompt that has been read, but for its last token, as llama.cpp counts."""
    prompt = prompts[index]
    first, _ = decode(decoder, prompt, gamma=0, num_tokens=1)  # both models read the prompt
    if gamma:
        decode(decoder, prompt, gamma=1, num_tokens=2)
    started = time.perf_counter()
    token_ids, num_passes = decode(decoder, prompt, gamma=gamma, num_tokens=args.tokens, held=len(prompt) - 1)
    seconds = time.perf_counter() - started
    assert token_ids[0] == first[0]
    text = Tokenizer.load(args.target).decode([*prompt, *token_ids])
    return Run(seconds / len(token_ids), text, len(token_ids) / num_passes)


def _race(variants: dict[str, Variant], num_prompts: int, rounds: int) -> dict[str, list[Run]]:
    """The best run of every variant and prompt."""
    best: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for name, run in variants.items():
            runs = [run(index) for index in range(num_prompts)]
            before = best.get(name, runs)
            best[name] = [min(pair, key=lambda each: each.seconds_per_token) for pair in zip(before, runs, strict=True)]
    return best


def _report(args: argparse.Namespace, prompts: Sequence[str], best: dict[str, list[Run]]) -> None:
    rates = {name: len(runs) / sum(run.seconds_per_token for run in runs) for name, runs in best.items()}
    first_plain = next(iter(best))
    results, rows = [], []
    for name, runs in best.items():
        result = {
            "variant": name,
            "tokens_per_s": rates[name],
            "over_own_target_only": rates[name] / rates[f"{_engine(name)} target-only"],
            "over_best_llama": rates[name] / _best_rival(name, rates),
            "tokens_per_pass": sum(run.tokens_per_pass for run in runs) / len(runs),
            "same_text": sum(_agree(run, other) for run, other in zip(runs, best[first_plain], strict=True)),
        }
        results.append(result)
        figures = [f"{value:.2f}" for value in result.values() if isinstance(value, float)]
        rows.append([name, *figures, f"{result['same_text']} of {len(prompts)}"])
    header = ["", "tokens/s", "/ own target-only", "/ llama.cpp's best", "tokens per pass", "same text"]
    print_table(f"{len(prompts)} prompts, {args.tokens} tokens each, {args.threads} thread(s)", header, rows)
    print_json("llama_cpp", {"threads": args.threads, "tokens": args.tokens, "variants": results})


def _engine(variant: str) -> str:
    """Its first two words: whose, and in which arithmetic."""
    return " ".join(variant.split()[:2])


def _best_rival(variant: str, rates: dict[str, float]) -> float:
    """llama.cpp's best rate in float32, or in 8 bits for variants in 8 bits."""
    rival = "llama.cpp f32" if _engine(variant).endswith("32") else "llama.cpp q8_0"
    return max((rate for name, rate in rates.items() if _engine(name) == rival), default=float("nan"))


def _agree(run: Run, other: Run) -> bool:
    """Programs stop a few tokens apart, so one text may be longer."""
    ours, theirs = run.text.strip(), other.text.strip()
    length = min(len(ours), len(theirs))
    return ours[:length] == theirs[:length]


if __name__ == "__main__":
    main()
