"""Passes of the torch backend on a device: `python -m benchmarks.device --device cuda|neuron [--model DIR]`.

It measures what judges a new compiler, in this order: whether its passes choose the CPU's tokens, the cost of writing
keys and values, pass times by width and length, the copy of logits to the host, graphs, and the host's own share of a
call. Times are medians of repeated runs, which take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import print_json, print_table
from benchmarks.timing import interleaved
from specdec.inference.backends.pytorch.backend import TorchBackend, load_torch_backend
from specdec.inference.backends.pytorch.static_pass import StaticPasses
from specdec.inference.backends.registry import load_backend
from specdec.inference.config import BUNDLED_TARGET, ROOT, ModelConfig, NeuronOptions
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Span
from specdec.inference.text.tokenizer import Tokenizer

NUM_COMPARED = 64
"""Number of tokens of the text after each of which device and CPU choose the next token."""


def main() -> None:
    args = _parser().parse_args()
    backend, seconds = _loaded(args)
    graphs = {"num": backend.graphs.num, "load_s": seconds}  # the measurements below make more
    results = {
        "choices": _compare_choices(args, backend),
        "writes": _measure_writes(args, backend),
        "passes": _measure_passes(args, backend),
        "graphs": graphs,
    }
    title = "Loading, and making all graphs"
    print_table(title, ["graphs", "s", "s per graph"], [_graph_row(int(graphs["num"]), seconds)])
    print_json("device", {"device": args.device, "arithmetic": backend.arithmetic, **results})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--device", required=True, help="cuda or neuron; cpu compiles with inductor")
    parser.add_argument("--model", type=Path, default=BUNDLED_TARGET, help="%(default)s")
    parser.add_argument("--dtype", default="auto", help="%(default)s: bfloat16, float32 on a CPU")
    parser.add_argument("--batch", type=int, default=4, help="slots (%(default)s)")
    parser.add_argument("--gamma", type=int, default=4, help="wide passes have one token more (%(default)s)")
    parser.add_argument("--length", type=int, default=None, help="positions (default: the model's, at most 2048)")
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="for the choices (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="%(default)s")
    return parser


def _loaded(args: argparse.Namespace) -> tuple[TorchBackend, float]:
    """Load the model; return its backend, and the seconds that this took, with all graphs.

    Raises:
        ConfigError: the device is not there, or its passes have no fixed shapes, and so no graphs.
    """
    config = ModelConfig(
        args.model,
        backend="torch",
        device=args.device,
        dtype=args.dtype,
        num_slots=args.batch,
        exact="never",  # each width is measured by itself
        sequence_length=args.length,
        compile_policy="always" if args.device == "cpu" else "auto",
        neuron=NeuronOptions(gamma=args.gamma),
    )
    started = time.monotonic()
    backend = load_backend(config)
    if not isinstance(backend, TorchBackend) or not isinstance(backend.passes, StaticPasses):
        raise ConfigError(f"device {args.device}: passes run operator by operator, so there are no graphs to measure")
    return backend, time.monotonic() - started


def _compare_choices(args: argparse.Namespace, backend: TorchBackend) -> dict[str, int]:
    """Count after how many tokens of a text the device chooses the same next token as the CPU; print and return it.

    The device computes token by token; the CPU computes all tokens at once, in float32. The result has the count as
    "same", and the number of all tokens as "tokens".
    """
    token_ids = list(Tokenizer.load(args.model).encode(args.text.read_text()))[:NUM_COMPARED]
    config = ModelConfig(args.model, device="cpu", dtype="float32", num_slots=1, sequence_length=backend.max_length)
    plain = load_torch_backend(config).forward([Span(0, 0, token_ids, len(token_ids))])
    rows = [_host(backend.forward([Span(0, place, [token], 1)])) for place, token in enumerate(token_ids)]
    same = (torch.cat(rows).argmax(1) == _host(plain).argmax(1)).sum().item()
    found = {"same": int(same), "tokens": len(token_ids)}
    title = "Greedy choices in single passes, and on the CPU in float32"
    print_table(title, ["the same", "of"], [[str(value) for value in found.values()]])
    return found


def _host(logits: Any) -> Tensor:
    return torch.as_tensor(logits).cpu()


@torch.inference_mode()
def _measure_writes(args: argparse.Namespace, backend: TorchBackend) -> dict[str, float]:
    """Time two ways to write new keys into one layer's KV cache, each as a graph; print and return milliseconds.

    They are "scatter", which passes use, and "select", by `torch.where`.
    """
    passes = _static(backend)
    cache = passes.cache
    room, width = cache.keys[0].clone(), args.gamma + 1
    places = torch.arange(width).expand(args.batch, width).contiguous().to(room.device)
    positions = torch.arange(room.shape[2]).to(room.device)
    new = room[:, :, :width].clone()  # [num_slots, num_kv_heads, width, dim]

    def scatter() -> Tensor:
        room.scatter_(2, places[:, None, :, None].expand_as(new), new)
        return room[:, :, :1]

    def select() -> Tensor:
        is_here = places[:, :, None] == positions  # [num_slots, width, num_positions]
        moved = is_here.to(new.dtype).transpose(1, 2)[:, None] @ new
        room.copy_(torch.where(is_here.any(1)[:, None, :, None], moved, room))
        return room[:, :, :1]

    variants = {name: _waited(passes.maker.make(run)) for name, run in (("scatter", scatter), ("select", select))}
    times = interleaved(variants, rounds=args.rounds)
    found = {name: taken.median for name, taken in times.items()}
    title = f"Writing {width} keys per slot, ms; a pass does it {2 * len(cache.keys)} times"
    print_table(title, list(found), [[f"{value:.3f}" for value in found.values()]])
    return found


def _measure_passes(args: argparse.Namespace, backend: TorchBackend) -> list[dict[str, Any]]:
    """Time passes over all sequences, by width and by positions that attention reads; print and return medians in ms.

    "host" is the time until the call returns, "pass" until the device has finished, and "transfer" that of the copy of
    all logits to the host.
    """
    passes = _static(backend)
    results, rows = [], []
    for shape in passes.shapes.all():
        if shape.batch < args.batch and not shape.is_prompt:
            continue
        start = shape.length - shape.width
        spans = [Span(slot, start, (0,) * shape.width, 1) for slot in range(shape.batch)]
        launch = partial(_launch, passes, shape, spans)
        times = interleaved({"host": launch, "pass": _waited(launch)}, rounds=args.rounds)
        transfer = interleaved({"transfer": partial(Tensor.cpu, _waited(launch)())}, rounds=args.rounds)
        found = {name: taken.median for name, taken in {**times, **transfer}.items()}
        results.append({"batch": shape.batch, "width": shape.width, "length": shape.length, **found})
        rows.append([str(value) if isinstance(value, int) else f"{value:.2f}" for value in results[-1].values()])
    header = ["spans", "width", "positions", "call on the host, ms", "pass, ms", "all logits to the host, ms"]
    print_table("Passes", header, rows)
    return results


def _static(backend: TorchBackend) -> StaticPasses:
    assert isinstance(backend.passes, StaticPasses)  # _loaded has refused others
    return backend.passes


@torch.inference_mode()
def _launch(passes: StaticPasses, shape: Any, spans: list[Span]) -> Tensor:
    return passes.launch(shape, spans)[1]


def _waited(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that calls `run`, waits until the device has finished, and returns the result."""

    @torch.inference_mode()
    def waited() -> Tensor:
        result = run()
        if result.device.type != "cpu":
            torch.accelerator.synchronize()
        return result

    return waited


def _graph_row(num_graphs: int, seconds: float) -> list[str]:
    return [str(num_graphs), f"{seconds:.1f}", f"{seconds / max(1, num_graphs):.2f}"]


if __name__ == "__main__":
    main()
