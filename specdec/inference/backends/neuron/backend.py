"""Backend of Neuron devices: a causal language model compiled by NxDI (NxD Inference), which keeps sequences in slots.

The backend keeps count of the tokens in each slot and orders the calls of the graphs; it knows nothing of compiling.
Logits come to the host in float32, and the host chooses the tokens, by the same rule and the same seeded random numbers
as over any other backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PretrainedConfig

from specdec.inference.backends.architectures import require_supported_config, resolve_length
from specdec.inference.backends.checkpoint import load_config
from specdec.inference.backends.neuron.environment import check_logical_cores
from specdec.inference.backends.neuron.graphs.application import Compilation, slot_compilation
from specdec.inference.backends.neuron.graphs.calls import continued_call, prompt_call
from specdec.inference.backends.neuron.graphs.checks import check_family, check_sharding
from specdec.inference.backends.neuron.graphs.plan import Reading, next_rows, prompt_row, reading, takes_few_passes
from specdec.inference.backends.neuron.graphs.settings import slot_arguments
from specdec.inference.backends.neuron.graphs.shape import SlotShape
from specdec.inference.backends.spans import check_spans
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError
from specdec.inference.model.slots import Array, Span


class Application(Protocol):
    """Part of NxDI's application object that this backend uses."""

    def forward(self, **tensors: Any) -> Any:
        """Run the graph that fits the tensors, which are those that a function of `graphs/calls.py` returns, by name.

        A graph that returns logits has them as the result's `logits`, [num_rows, width, vocab_size]: of all tokens of a
        pass, or with width 1 of a prompt's last token. The last axis may be longer, by padding.
        """


class CompiledModel:
    """Base class of models that NxDI has compiled; it has NxDI's application and the limits of graphs and slots.

    Args:
        application: NxDI's application, loaded.
        shape: limits of the compiled graphs.
    """

    def __init__(self, application: Application, shape: SlotShape) -> None:
        self._application = application
        self._shape = shape
        self.vocab_size, self.num_slots, self.max_length = shape.vocab_size, shape.num_slots, shape.max_length
        self.slot_bytes = shape.slot_bytes


class NeuronBackend(CompiledModel):
    """Model with slots, and with graphs for prompts, for one token, and for `shape.width` tokens if that is above 1.

    Args:
        application: NxDI's application, loaded.
        shape: limits of the compiled graphs.
        one_width: True to use the graph of `shape.width` tokens for single tokens too: in bfloat16 the graphs may
            choose different tokens.
    """

    def __init__(self, application: Application, shape: SlotShape, *, one_width: bool = False) -> None:
        super().__init__(application, shape)
        self._one_width = one_width
        self._held: list[list[int]] = [[] for _ in range(shape.num_slots)]
        self.max_pass_tokens = shape.width
        self.prompt_chunk_tokens = shape.max_prompt  # the prompt graph reads a whole prompt in one call

    def goes_on(self, num_held: int, num_tokens: int) -> bool:
        """Return whether to reuse the first `num_held` tokens of a prompt of `num_tokens`, which a slot holds.

        They are reused if a few passes can read the rest; else the prompt graph reads the whole prompt again.
        """
        return takes_few_passes(num_tokens - num_held, width=self._shape.width)

    @torch.no_grad()
    def forward(self, spans: Sequence[Span]) -> Array:
        """Run one pass over spans of distinct slots; return logits as a numpy array, float32 [num_rows, vocab_size]."""
        check_spans(spans, self)
        works = [reading(span, self._held[span.slot]) for span in spans]
        for work in works:
            self._read_prompt(work)
        while any(work.num_left for work in works):
            self._run_pass(works)
        for work in works:
            self._held[work.slot] = list(work.token_ids)
        rows: list[Any] = [row for work in works for row in work.rows]
        return np.stack(rows) if rows else np.empty((0, self.vocab_size), dtype=np.float32)

    def _read_prompt(self, work: Reading) -> None:
        """Read as many of a span's first tokens as the prompt graph takes at once; the others are left to passes.

        Nothing is read if the whole span is better read by passes, which the function `prompt_row` decides.
        """
        row = prompt_row(work, width=self._shape.width, max_prompt=self._shape.max_prompt)
        if row is None:
            return
        call = prompt_call(row, widest=self._shape.prompt_width)
        logits = self._logits(call)  # [1, 1, vocab_size], of the last token alone
        self._keep(work, len(row.token_ids) - 1, logits[0, -1:])
        work.position = len(row.token_ids)

    def _run_pass(self, works: Sequence[Reading]) -> None:
        """Make one call of the application, over the next tokens of every span that has tokens left to read."""
        rows, width = next_rows(works, width=self._shape.width, one_width=self._one_width)
        logits = self._logits(continued_call(rows, width=width))  # [num_rows, width, vocab_size]
        by_slot = {work.slot: work for work in works}
        for row, of_row in zip(rows, logits, strict=True):
            work = by_slot[row.slot]
            self._keep(work, row.start, of_row[: len(row.token_ids)])
            work.position += len(row.token_ids)

    def _logits(self, call: dict[str, Any]) -> np.ndarray[Any, Any]:
        logits: torch.Tensor = self._application.forward(**call).logits
        # The output layer may be padded to a multiple of the cores.
        of_vocabulary: np.ndarray[Any, Any] = logits[..., : self.vocab_size].float().cpu().numpy()
        return of_vocabulary

    def _keep(self, work: Reading, position: int, logits: np.ndarray[Any, Any]) -> None:
        """Append the rows of `logits` that the span asks for to `work.rows`; row 0 is of the token at `position`."""
        work.rows.extend(row for at, row in enumerate(logits, start=position) if work.wants(at))


def load_neuron_backend(config: ModelConfig) -> NeuronBackend:
    """Load a checkpoint through NxDI; compile it first if the folder of compiled models does not have it.

    Raises:
        ConfigError: NxDI is missing, or the checkpoint or the settings cannot be used; the message names which.
    """
    compilation = slot_model(config)
    return NeuronBackend(compilation.load(), compilation.shape, one_width=config.exact == "always")


def slot_model(config: ModelConfig) -> Compilation:
    """Check the configuration of a model whose tokens the host chooses; return what compiles and loads it.

    Raises:
        ConfigError: the configuration asks for another speculation method or for tokens chosen on the device, or the
            model or the settings cannot be used.
    """
    options = config.neuron
    if options.method != "vanilla":
        raise ConfigError(
            f"speculation_method {options.method} needs a target and a draft model: use role fused_target"
        )
    if options.device_sampling:
        raise ConfigError("device_sampling: a draft, or a target that verifies one, needs its logits on the host")
    model_config, length = checked_config(config)
    return slot_compilation(config, model_config, slot_arguments(config, length=length))


def checked_config(config: ModelConfig) -> tuple[PretrainedConfig, int]:
    """Return the configuration in a checkpoint's config.json, and the number of positions of a slot.

    Raises:
        ConfigError: the model cannot be used, or not with the device and the cores that are asked for.
    """
    if config.device != "auto":
        raise ConfigError(f"device {config.device}: backend neuron takes the cores of NEURON_RT_VISIBLE_CORES")
    check_logical_cores(config.neuron.overrides)
    model_config = load_config(config.path)
    length = resolve_length(model_config, config.sequence_length)
    check_model(config, model_config, length)
    return model_config, length


def check_model(config: ModelConfig, model_config: PretrainedConfig, length: int) -> None:
    """Raise ConfigError if NxDI cannot run a checkpoint in slots of `length` positions, or split it over the cores."""
    require_supported_config(model_config, length)
    check_family(config.path, model_config)
    check_sharding(config.path, model_config, config.neuron.tp_degree)
