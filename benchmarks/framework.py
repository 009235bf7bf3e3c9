"""Cost of a pass beside matrix products and attention: `python -m benchmarks.framework [--models draft,target]`.

The same decoder runs three times: as it serves (a call of the backend, then the choice of a token), as the session of
ONNX Runtime alone, and as a graph of only embedding, matrix products and attention. Time beyond that of this last graph
is the framework's share: norms, activations, sums, the runtime's dispatch, Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines import PAST_LENGTH, token_ids
from benchmarks.report import print_json, print_table
from benchmarks.shapes import MAX_LENGTH, SHAPES, checkpoint, workspace
from benchmarks.timing import Times, interleaved
from specdec.inference.backends.onnx.backend import OnnxBackend
from specdec.inference.backends.onnx.graph import DecoderGraph
from specdec.inference.backends.onnx.packed import PackedDecoder, packed_decoder
from specdec.inference.backends.onnx.passes import OnnxPass
from specdec.inference.backends.onnx.places import single_places
from specdec.inference.backends.onnx.slots import OnnxSlots
from specdec.inference.model.slots import Span
from specdec.inference.request import SamplingParams
from specdec.inference.sampling.choice import choose_tokens

WIDTHS = (1, 6)


class BareGraph(DecoderGraph):
    """Graph of a decoder with only the parts that read weights or the KV cache; its logits mean nothing."""

    def _rms_norm(self, hidden: str, weight: str, output: str, eps: float) -> str:
        return hidden

    def _project_and_norm(self, name: str, layer: int, hidden: str, residual: str, norm: str) -> tuple[str, str]:
        projected = self._linear(name, layer, hidden)
        return projected, projected

    def _activate(self, layer: int, gate: str, up: str) -> str:
        return up  # nothing reads the gate's product, which is computed all the same


def main() -> None:
    args = _parser().parse_args()
    results = []
    with workspace(None) as folder:
        for name in args.models.split(","):
            for width in WIDTHS:
                times = _measure(checkpoint(name, folder), args.threads, width)
                results.append({"model": name, "width": width, **_figures(times)})
    header = ["", "serving, ms", "session, ms", "products and attention, ms", "framework's share"]
    print_table(f"{args.threads} thread(s), minimum of each", header, [_row(result) for result in results])
    print_json("framework", results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.framework", description=__doc__)
    parser.add_argument("--models", default="draft,target", help=f"of {', '.join(SHAPES)} (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    return parser


def _measure(path: Path, num_threads: int, width: int) -> dict[str, Times]:
    decoder = packed_decoder(path, "float32", None)
    variants: dict[str, Callable[[], object]] = {
        "serving": _serving(decoder, num_threads, width),
        "session": _session(decoder, num_threads, width, DecoderGraph),
        "bare": _session(decoder, num_threads, width, BareGraph),
    }
    return interleaved(variants, rounds=60, runs=10, seconds=15)


def _span(width: int) -> Span:
    return Span(0, PAST_LENGTH, token_ids(width), width)


def _serving(decoder: PackedDecoder, num_threads: int, width: int) -> Callable[[], object]:
    backend = OnnxBackend(decoder, num_slots=1, max_length=MAX_LENGTH, num_threads=num_threads)
    backend.forward([Span(0, 0, token_ids(PAST_LENGTH), 0)])
    positions, sampling = list(range(PAST_LENGTH, PAST_LENGTH + width)), [SamplingParams()] * width

    def serve() -> object:
        return choose_tokens(backend.forward([_span(width)]), sampling, positions)

    return serve


def _session(
    decoder: PackedDecoder, num_threads: int, width: int, graph_type: type[DecoderGraph]
) -> Callable[[], object]:
    """Return a function that runs a graph of the decoder once in ONNX Runtime, with inputs that are already bound."""
    slots = OnnxSlots(decoder.shape, num_slots=1, max_length=MAX_LENGTH)
    graph = graph_type(decoder.shape, decoder.dtype, 1, slots.room).build(decoder.weights)
    onnx_pass = OnnxPass(decoder, slots, graph, num_places=1, num_threads=num_threads)
    spans = [_span(width)]
    onnx_pass.run(spans, single_places(spans))
    return partial(onnx_pass._session.run_with_iobinding, onnx_pass._binding)


def _figures(times: dict[str, Times]) -> dict[str, float]:
    return {f"{name}_ms": taken.minimum for name, taken in times.items()} | {
        "share": 1 - times["bare"].minimum / times["serving"].minimum
    }


def _row(result: dict[str, Any]) -> list[str]:
    figures = [f"{result[f'{name}_ms']:.3f}" for name in ("serving", "session", "bare")]
    return [f"{result['model']}, width {result['width']}", *figures, f"{result['share']:.0%}"]


if __name__ == "__main__":
    main()
