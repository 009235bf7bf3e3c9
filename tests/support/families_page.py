"""Generator of docs/families.md, from the model families that tests cover: `python -m tests.support.families_page`."""

from __future__ import annotations

from specdec.inference.config import ROOT
from tests.support.models import CONTRACTS, FAMILIES

PAGE = ROOT / "docs" / "families.md"
EXACT, CLOSE = "exact", "close"
WORDS = {"float32": EXACT, "bfloat16": CLOSE, "int8": CLOSE}
HEAD = """# Families

Which models our own engine serves, made by `python -m tests.support.families_page` from what the contract suite runs. A
family is Transformers' `model_type`; what follows the comma is a variant of it.

- **exact**: after any history of a slot (prompts, verification, rollbacks, several sequences in a pass) every logit is
  that of a fresh forward pass of Transformers to 1e-4, and greedy text is that of `generate()`.
- **close**: the same histories, with the rounding of bfloat16 or int8.
- empty: not tested. In bfloat16 a tie between experts can send a token to other experts, which no tolerance describes.
  Backend `onnx` refuses what it cannot run, and `auto` then takes `torch`.

In bfloat16 and float16 every family of the second column has the same bits whatever its passes have beside it
([`--exact`](speculation.md#--exact)). Families with experts (qwen3_moe, mixtral, gpt_oss) have no such promise: the
rows of each expert vary with the tokens. The log says so at the start.

Sliding windows, soft-capped scores and attention sinks are applied as Transformers applies them. On
`torch` a window saves time: 4,096 positions deep, passes of a 110M model take 0.5 to 0.7 of it with windows of 512
(busy machine); on `onnx` it saves none.

On a CPU a pass of `torch` takes 1.3 times (110M parameters) to 4 times (12M) as long as one of `onnx`.

Of a multimodal model (`gemma3`, the larger Gemma-3) the language model alone is served.

The experts of gpt-oss, stored in MXFP4, are unpacked when they are loaded. gpt-oss has no chat
here: its channels, analysis and final, are special tokens that have no text, so `content` has both without a sign
between them, and its calls are not read. Its completions are exact.

Refused by name, on every backend: recurrent state, ALiBi, encoder-decoders, chunked attention, rotary frequencies that
change with the length seen (`dynamic`; `longrope` beyond its original positions: choose a shorter `--sequence_length`),
a window that a family puts into its masks and does not name to its attention. Neuron: [neuron.md](neuron.md), without
windows.
"""


def page() -> str:
    """Return the text of docs/families.md, with a table of model families by backend and dtype."""
    columns = list(CONTRACTS)
    header = "".join(f" {backend} {dtype} |" for backend, dtype in columns)
    rows = [f"| family |{header}", "|---|" + "---|" * len(columns)]
    for family in FAMILIES:
        cells = (WORDS[dtype] if family in CONTRACTS[backend, dtype] else "" for backend, dtype in columns)
        rows.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([HEAD, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
