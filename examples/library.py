"""Generation in a script, without a server: whole answers, a stream, and `async` code.

    python examples/library.py

The bundled models answer. `specdec.LLM("TARGET", "DRAFT")` takes others, `specdec.Client("HOST:50051")` asks a server.
"""

from __future__ import annotations

import asyncio

import specdec


def batch(llm: specdec.LLM) -> None:
    """Complete several prompts at once."""
    for result in llm.generate(["1, 2, 3, 4,", "Once upon a time"], max_new_tokens=24):
        acceptance = result.stats.acceptance_rate or 0.0
        print(f"{result.prompt}{result.text}\n({len(result.token_ids)} tokens, acceptance {acceptance:.2f})")


def stream(llm: specdec.LLM) -> None:
    """Print a sampled answer as it comes; a regular expression constrains it."""
    for part in llm.stream("The answer is", temperature=0.8, seed=7, structured_outputs={"regex": " [0-9]{2,4}"}):
        print(part.text, end="", flush=True)
    print()


async def chat() -> None:
    """Ask a target without a draft model, from `async` code."""
    async with specdec.AsyncLLM(specdec.BUNDLED_TARGET) as llm:
        (result,) = await llm.generate([{"role": "user", "content": "Count: 1, 2, 3,"}], max_new_tokens=12)
        print(result.text)


def main() -> None:
    with specdec.LLM(sequence_length=512) as llm:
        batch(llm)
        stream(llm)
    asyncio.run(chat())


if __name__ == "__main__":
    main()
