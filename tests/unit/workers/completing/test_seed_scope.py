"""With seed_scope "prompt", equal seeds give other random numbers for other prompts; resumed answers keep theirs."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace

import pytest

from specdec.inference.commit import Delta, Started
from specdec.inference.config import BUNDLED_TARGET, ROOT
from specdec.inference.request import MAX_SEED, Provenance, SamplingParams, SeedScope
from specdec.inference.sampling.noise import seed_of_prompt
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.workers.completing.reading import Reader, digest
from specdec.inference.workers.completing.resuming import Progress
from specdec.inference.workers.completion import CompletionRequest

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
NOISE_PAGE = (ROOT / "docs/noise.md").read_text(encoding="utf-8")
REQUEST = CompletionRequest((5, 6, 7), SamplingParams(temperature=1.0), seed=7, seed_scope=SeedScope.PROMPT)


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(Tokenizer.load(BUNDLED_TARGET), max_length=64, vocab_size=2000)


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def documented(seed: int, token_ids: tuple[int, ...]) -> int:
    """Return the seed that a prompt gets by the rule in docs/noise.md, computed without the project's code."""
    first = hashlib.sha256(b"".join(struct.pack("<I", each) for each in token_ids)).digest()[:8]
    return mix(mix(seed + GOLDEN) + int.from_bytes(first, "big"))


async def seed_read(reader: Reader, request: CompletionRequest) -> int:
    return (await reader.read(request)).sampling.seed


@pytest.mark.parametrize("seed", [0, 7, MAX_SEED])
async def test_the_seed_in_use_is_the_documented_one(reader: Reader, seed: int) -> None:
    for prompt in ((5, 6, 7), (5, 6), (7, 6, 5)):
        request = replace(REQUEST, prompt=prompt, seed=seed)
        assert await seed_read(reader, request) == documented(seed, prompt)
        assert await seed_read(reader, replace(request, seed_scope=SeedScope.ALL)) == seed


async def test_a_text_and_its_ids_have_one_seed(reader: Reader) -> None:
    text = replace(REQUEST, prompt="Once upon a time")
    token_ids = (await reader.read(text)).prompt_token_ids
    assert await seed_read(reader, text) == await seed_read(reader, replace(text, prompt=token_ids))


def test_the_pages_table_has_the_rules_seeds() -> None:
    rows = re.findall(
        r"^\| ([\d, ]+) \| (\d+) \| ([0-9a-f]{16}) \| (\d+) \|$", (ROOT / "docs/noise.md").read_text(), re.M
    )
    assert len(rows) >= 3
    for ids, seed, prompt_digest, mixed in rows:
        token_ids = tuple(map(int, ids.split(", ")))
        assert digest(token_ids) == prompt_digest
        assert seed_of_prompt(int(seed), prompt_digest) == documented(int(seed), token_ids) == int(mixed)


async def test_a_resumed_answer_keeps_the_seed_in_use(reader: Reader) -> None:
    """A server that goes on with an answer gets the seed that was mixed with the prompt, and does not mix it again."""
    mixed = await seed_read(reader, REQUEST)
    progress = Progress(REQUEST)
    assert progress.rest() == REQUEST
    progress.take(Started(3, mixed, provenance=Provenance("model", "", digest((5, 6, 7)))))
    progress.take(Delta(3, (9,), text="a"))
    rest = progress.rest()
    assert (rest.seed, rest.seed_scope) == (mixed, SeedScope.ALL)
    assert await seed_read(reader, rest) == mixed
