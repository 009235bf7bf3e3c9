"""The torch backend: it runs causal language models of Transformers that need nothing but keys and values by position.

Implements `Backend` (`inference/model/slots.py`), and loads a checkpoint. Passes run as they come or in fixed shapes
(`specdec.inference.backends.pytorch.passes`). Knows nothing of tokenizers, sampling or speculation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.inference.backends.architectures import (
    has_experts,
    require_supported_config,
    require_supported_model,
    resolve_length,
)
from specdec.inference.backends.checkpoint import load_config, load_weights
from specdec.inference.backends.devices import DEVICE, require_torch_neuron
from specdec.inference.backends.digests import user_cache
from specdec.inference.backends.pytorch.attention import SlotPass
from specdec.inference.backends.pytorch.graphs import Captured, Compiled
from specdec.inference.backends.pytorch.packed_linear import pack_linears
from specdec.inference.backends.pytorch.passes import EagerPasses, Passes
from specdec.inference.backends.pytorch.runner import ModelRunner
from specdec.inference.backends.pytorch.shapes import Buckets
from specdec.inference.backends.pytorch.slot_cache import SlotCache
from specdec.inference.backends.pytorch.static_pass import FixedShapes, StaticPasses
from specdec.inference.backends.pytorch.windows import WindowPasses, choose_windows
from specdec.inference.backends.spans import check_spans
from specdec.inference.config import COMPILE_POLICIES, ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Array, GraphCounts, Span, Windows

logger = logging.getLogger(__name__)

CAPTURED = Buckets(widths=(1, 2, 3, 5, 9, 17), prompts=(128, 512), batches=(1, 2, 4, 8, 16, 32, 64, 128))
"""Sizes of passes on CUDA, where a graph takes 0.1 s to make. Width 17 verifies 16 draft tokens."""

NUM_TEST_TOKENS = 4
"""Number of tokens for which logits are compared before and after linear layers are packed."""


class TorchBackend:
    """A causal language model and its slots. Replaces the model's attention by one that reads from the slots.

    Args:
        model: model that `require_supported_config` does not refuse; nothing else may use it.
        fixed: shapes to which all passes are padded; None: each pass has its own shape, and runs operator by operator.
        device: device that the model moves to, after a test pass on its present device; None: it does not move.
        windows: runs of positions that passes always compute whole (see `windows.py`); `fixed` then has the one shape
            of such a pass. None: passes compute just the tokens of their spans.

    Attributes:
        passes: runner of the model over spans that have been checked.
        max_pass_tokens: most tokens of one span that one pass can run with logits for all of them.
        prompt_chunk_tokens: number of a prompt's tokens that one pass should read; 0: any number.

    Raises:
        UnsupportedModelError: slots of keys and values cannot carry this architecture.
        ConfigError: the device has not enough memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_length: int,
        fixed: FixedShapes | None = None,
        device: torch.device | None = None,
        windows: Windows | None = None,
    ) -> None:
        require_supported_model(model)
        runner = ModelRunner(model, max_length)
        _move(model, device or model.device)
        self.vocab_size, self.num_slots, self.max_length = runner.vocab_size, num_slots, max_length
        self.arithmetic = f"torch {model.dtype} {model.device.type}{'' if fixed is None else fixed.maker.arithmetic}"
        self.windows = windows
        kind = {"dtype": model.dtype, "device": model.device}
        num_spare = int(fixed is not None)
        cache = SlotCache(runner.layers, num_slots=num_slots, max_length=max_length, num_spare=num_spare, **kind)
        self.slot_bytes = cache.slot_bytes
        num_rows = 0 if windows is None else windows.num * windows.width
        self.passes: Passes = (
            EagerPasses(runner, cache, num_rows) if fixed is None else StaticPasses(runner, cache, fixed)
        )
        if windows is not None:
            self.passes = WindowPasses(self.passes, windows, num_slots=num_slots, max_length=max_length)
            self.arithmetic += f", {windows.num} windows of {windows.width}{'' if fixed is None else ' in one shape'}"
        self.max_pass_tokens, self.prompt_chunk_tokens = self.passes.widest, self.passes.widest_part
        keeps_linears = fixed is not None and fixed.maker.graphs_only
        if model.device.type == "cpu" and model.dtype == torch.float32 and not keeps_linears:
            _pack_linears(runner, SlotCache(runner.layers, num_slots=1, max_length=NUM_TEST_TOKENS, **kind))

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        """Return True: a prompt always reuses the tokens that its slot holds."""
        return True

    @property
    def graphs(self) -> GraphCounts:
        """Return how many graphs were made for the passes."""
        return self.passes.graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make the graphs of all passes, if passes have fixed shapes; this overwrites slots."""
        self.passes.warm_up()

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over spans of distinct slots; return logits, float32 [num_rows, vocab_size].

        The logits are a torch tensor on CUDA, and a numpy array elsewhere.
        """
        check_spans(spans, self)
        logits = self.passes.forward(spans).float()  # [num_rows, vocab_size]
        return logits.numpy() if logits.device.type == "cpu" else logits

    @torch.inference_mode()
    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        self.passes.fork(source_slot, destination_slot, start, end)


@torch.inference_mode()
def _pack_linears(runner: ModelRunner, cache: SlotCache) -> None:
    """Replace linear layers by packed ones (`packed_linear`); a pass that tests the logits writes to `cache`."""
    span = Span(slot=0, start=0, token_ids=range(NUM_TEST_TOKENS), num_logits=NUM_TEST_TOKENS)
    inputs = torch.tensor([span.token_ids, span.token_ids]) % runner.vocab_size  # [2, num_tokens]
    slot_pass = SlotPass(cache, [span], dtype=torch.float32, device=runner.model.device)
    pack_linears(runner.model, lambda: runner.logits(inputs, slot_pass))


def _move(model: PreTrainedModel, device: torch.device) -> None:
    try:
        model.to(device)
    except RuntimeError as error:  # of which a lack of memory is one
        raise ConfigError(f"the model's weights do not go into the memory of device {device}: {error}") from error


def load_torch_backend(config: ModelConfig) -> TorchBackend:
    """Load a checkpoint from its directory; never from the network.

    Raises:
        ConfigError: the directory, the checkpoint or the settings cannot be used; the message names which.
    """
    model_config = load_config(config.path)
    max_length = resolve_length(model_config, config.sequence_length)
    require_supported_config(model_config, max_length, windows=True)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    windows = choose_windows(config, dtype, device, has_experts=has_experts(model_config))
    fixed = _fixed_shapes(config, device)
    if fixed is not None and windows is not None:
        widths, batches = (windows.width,), (windows.num,)
        buckets = replace(fixed.buckets, widths=widths, prompts=(), batches=batches, shares_slots=True)
        fixed = replace(fixed, buckets=buckets)
    first = torch.device("cpu") if fixed is not None and fixed.maker.graphs_only else device
    model = load_weights(config.path, model_config, dtype=dtype, device=first)
    sizes: dict[str, Any] = {"num_slots": config.num_slots, "max_length": max_length, "windows": windows}
    if fixed is not None:
        try:
            backend = TorchBackend(model, fixed=fixed, device=device, **sizes)
            backend.warm_up()
            return backend
        except ConfigError:
            raise
        except Exception as error:  # compilers raise errors of all kinds, such as for a layer that asks for sizes
            message = f"model {config.name}: its passes cannot be {fixed.maker.name}: {error}"
            if fixed.maker.graphs_only:
                raise ConfigError(f"{message}; this device runs nothing else") from error
            if config.compile_policy != COMPILE_POLICIES[0]:
                raise ConfigError(f"{message}; --compile never runs without graphs") from error
            logger.warning("%s; they run operator by operator", message)
    return TorchBackend(model, **sizes)


def compile_models(target: ModelConfig | None, draft: ModelConfig | None) -> None:
    """Compile the passes of the given models; torch keeps the code on disk for servers that load the models later.

    Raises:
        ConfigError: a model or the settings cannot be used.
    """
    for config in (target, draft):
        if config is not None:
            load_torch_backend(config)


def _fixed_shapes(config: ModelConfig, device: torch.device) -> FixedShapes | None:
    """Return how passes are padded to fixed shapes on a device; None if each pass runs at its own shape.

    Raises:
        ConfigError: the device runs compiled passes only, and `--compile never` forbids them.
    """
    widest = max(2, config.neuron.gamma + 1)  # a draft reads two tokens after a round in which all draft tokens stayed
    if config.device == DEVICE:
        if config.compile_policy == "never":
            raise ConfigError(f"compile never: device {DEVICE} runs nothing but compiled passes")
        buckets = Buckets(widths=(1, widest), prompts=(128, 512), shortest=1024)
        return FixedShapes(Compiled(DEVICE, graphs_only=True), buckets)
    if config.compile_policy == "never":
        return None
    if config.compile_policy == "auto":
        return None if device.type == "cpu" else FixedShapes(Captured(), CAPTURED)
    folder = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "inductor"))
    logger.info("compiled code is kept in %s", folder)
    return FixedShapes(Compiled("inductor"), Buckets(widths=(1, widest), prompts=(16, 128), batches=(1,)))


def resolve_device(name: str) -> torch.device:
    """Return a device of this machine; "auto" is CUDA if there is any, else the CPU.

    Raises:
        ConfigError: this machine has no device of this name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == DEVICE:
        require_torch_neuron()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name} is not a torch device") from error
    if name != DEVICE and device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name} is none of cpu, cuda, cuda:N and {DEVICE}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is not among the {torch.cuda.device_count()} CUDA devices here")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type of weights and passes on a device; "auto" is float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ConfigError: the type is not a floating point one.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype {name}: backend torch computes in floating point only; int8 is backend onnx's")
    return dtype
