"""Files of a model directory: what they tell before weights are loaded, and advice on formats that are not read.

Servers make these checks at their start, backends before they read weights, and `specdec doctor` before it reports
sizes. They read JSON and the headers of safetensors, without any library for tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.inference.errors import ConfigError

LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
"""Names that config.json may have for the number of positions that a model was trained for."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
"""Names of files with a tokenizer that Transformers can read or convert; a model directory must have one of them."""
READ_QUANTIZED = ("mxfp4",)
"""Methods of quantization of which weights can be read, since Transformers turns them into bfloat16."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHOWN = 80
"""Most characters of a field's value that an error message repeats."""
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Largest header in bytes that the safetensors format allows."""
MAX_COUNT, MAX_SIZE = 1 << 12, 1 << 30
"""Largest number of layers, heads or experts, and largest other size, that a config.json may name: libraries make lists
of so many elements before they look at the weights."""
_COUNTS = re.compile(r".*(layers?|heads?|experts)")
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "head_dim", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1),
    **dict.fromkeys(("intermediate_size", "sliding_window"), 0),
}
"""Least value of each field of config.json that has to be an integer, or null for the family's default."""
_LFS = b"version https://git-lfs"
COMPLETE = "a download that ended early looks like this: complete it"
OWN = "take the model's own"


@dataclass(frozen=True)
class CheckpointFiles:
    """Files of the model directory `path`, in the format of Hugging Face."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the fields of config.json; those of a multimodal model's `text_config` replace the outer ones.

        Raises:
            ConfigError: there is no model in the directory, or the file is damaged or names a size out of range.
        """
        stored = self._object("config.json") if (self.path / "config.json").is_file() else None
        if stored is None:
            raise self._fault(_absence(self.path))
        inner = stored.get("text_config")
        fields = {**stored, **inner} if isinstance(inner, dict) else stored
        for name, value in fields.items():
            least, limit = _SIZES.get(name, 0), MAX_COUNT if _COUNTS.fullmatch(name) else MAX_SIZE
            is_wrong = name in _SIZES and not _is_size(value, least, limit)
            if is_wrong or (limit == MAX_COUNT and isinstance(value, int) and value > limit):
                shown = json.dumps(value)[:MAX_SHOWN]
                raise self._fault(f"config.json: {name} must be an integer in {least}..{limit}, not {shown}; {OWN}")
        return fields

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """Return the fields of generation_config.json; without that file, an empty dictionary.

        Raises:
            ConfigError: the file is damaged.
        """
        name = "generation_config.json"
        return self._object(name) if (self.path / name).is_file() else {}

    @property
    def eos_token_ids(self) -> frozenset[int] | None:
        """Return the end-of-sequence ids in generation_config.json, else those in config.json; None if neither has any.

        Raises:
            ConfigError: they are not valid token ids.
        """
        config = self.config if (self.path / "config.json").is_file() else {}  # a tokenizer alone has none
        for name, stored in (("generation_config.json", self.generation_config), ("config.json", config)):
            if (eos := stored.get("eos_token_id")) is not None:
                ids = eos if isinstance(eos, list) else [eos]
                if not all(_is_integer(each, 0, MAX_SIZE) for each in ids):
                    shown = json.dumps(eos)[:MAX_SHOWN]
                    raise self._fault(f"{name}: eos_token_id must be a token id or a list of them, not {shown}; {OWN}")
                return frozenset(ids)
        return None

    @property
    def num_positions(self) -> float:
        """Return the number of positions that the model was trained for; infinity if config.json does not say it."""
        return next((self.config[name] for name in LENGTH_FIELDS if isinstance(self.config.get(name), int)), math.inf)

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output layer, which is the number of token ids.

        Raises:
            ConfigError: config.json has no vocab_size.
        """
        if isinstance(size := self.config.get("vocab_size"), int):
            return size
        raise self._fault("config.json has no vocab_size")

    @property
    def quantization(self) -> str | None:
        """Return the name of the method by which the weights are quantized; None if they are not."""
        stored = self.config.get("quantization_config")
        return str(stored.get("quant_method", "no method named"))[:MAX_SHOWN] if isinstance(stored, dict) else None

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all weights, by the headers of their files."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights by name, by the headers of their files."""
        return {name: tuple(tensor["shape"]) for name, tensor in self.tensors.items()}

    @property
    def tensors(self) -> dict[str, Mapping[str, Any]]:
        """Return the entries of weights in the headers of the files that are there, by name: dtype, shape, offsets."""
        present = [file for file in self.weights if file.is_file()]
        return {name: entry for file in present for name, entry in self._header(file).items()}

    @property
    def weight_bytes(self) -> int:
        """Return the size of the files of weights, in bytes."""
        return sum(file.stat().st_size for file in self.weights)

    def require_model(self) -> None:
        """Raise ConfigError unless the directory has a model with a valid config.json; see `config`."""
        _ = self.config

    def require_weights(self) -> None:
        """Raise ConfigError if the backends onnx and torch cannot read the weights; only headers are read."""
        _ = self.eos_token_ids
        if (self.path / "adapter_config.json").is_file():  # where PEFT is installed, it may name another directory
            raise self._fault("an adapter (LoRA) lies beside it: merge the two first, as PEFT's merge_and_unload does")
        if self.quantization is not None and self.quantization not in READ_QUANTIZED:
            raise self._fault(_other_numbers(self.quantization))
        weights = self.weights
        if not weights and any(self.path.glob("*.bin")):
            way = f"AutoModelForCausalLM.from_pretrained('{self.path}').save_pretrained('{self.path}-safe')"
            raise self._fault(
                f"its weights are pickles (.bin), which are not read here: make safetensors of them by {way}"
            )
        if not weights:
            raise self._fault(f"no file named model.safetensors there; {COMPLETE}")
        if missing := [file.name for file in weights if not file.is_file()]:
            shown = f"{len(missing)} of {len(weights)} files of weights are missing, such as {missing[0]}"
            raise self._fault(f"{shown}; {COMPLETE}")
        if weights[0].name != WHOLE and not isinstance(self._object(INDEX).get("metadata"), dict):
            raise self._fault(f'{INDEX} has no metadata: add "metadata": {{}} to it, which Transformers asks for')
        self.require_whole()

    def require_whole(self) -> None:
        """Raise ConfigError if a file of weights is incomplete; read only headers, and skip files that are missing."""
        for file in self.weights:
            if file.is_file():
                self._header(file)

    def require_tokenizer(self) -> None:
        """Raise ConfigError if the directory has no file of a tokenizer."""
        if not any((self.path / name).is_file() for name in TOKENIZERS):
            raise self._fault("no tokenizer.json there; copy the files tokenizer* of the model that it was made of")

    @property
    def weights(self) -> Sequence[Path]:
        """Return the files of weights, as Transformers chooses them; files that an index names may be missing."""
        whole = self.path / WHOLE
        if whole.is_file() or not (self.path / INDEX).is_file():
            return [whole] if whole.is_file() else []
        named = self._object(INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise self._fault(f"{INDEX} has no weight_map with the file of each weight; {COMPLETE}")
        return [self.path / name for name in sorted({*named.values()})]

    def _header(self, file: Path) -> Mapping[str, Any]:
        """Return the entry of each tensor, by its name, in the header of a file of weights.

        Raises:
            ConfigError: the header is damaged, or the file ends before its last tensor.
        """
        with file.open("rb") as content:
            start = content.read(8)
            length = int.from_bytes(start, "little")
            if _LFS.startswith(start) and start:
                raise self._fault(f"{file.name} is a pointer of Git LFS: get the file itself by `git lfs pull`")
            try:
                header = json.loads(content.read(length) if 0 < length <= MAX_HEADER_BYTES else b"")
                tensors = {name: each for name, each in header.items() if name != "__metadata__"}
                end = 8 + length + max(map(_end_of, tensors.values()), default=0)
            except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as exc:
                raise self._fault(f"the header of {file.name} is damaged; {COMPLETE}") from exc
        if (size := file.stat().st_size) < end:
            raise self._fault(f"{file.name} has {size} bytes of {end}, by its header; {COMPLETE}")
        return tensors

    def _object(self, name: str) -> dict[str, Any]:
        try:
            stored = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as exc:
            raise self._fault(f"{name} is not JSON ({exc}); {COMPLETE}") from exc
        if not isinstance(stored, dict):
            raise self._fault(f"{name} is not a JSON object; {OWN}")
        return stored

    def _fault(self, reason: str) -> ConfigError:
        return ConfigError(f"model {self.path}: {reason}")


def _is_size(value: Any, least: int, limit: int) -> bool:
    """Return whether a value of config.json can be a size: an integer in a range, one for each layer, or null."""
    return value is None or isinstance(value, list | dict) or _is_integer(value, least, limit)


def _is_integer(value: Any, least: int, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= limit


def _end_of(tensor: Any) -> int:
    """Return where a tensor's bytes end, in bytes after the header of its file.

    Args:
        tensor: the tensor's entry in the header, with `data_offsets` and `shape`.

    Raises:
        ValueError: its shape has more elements than the bytes could hold.
    """
    (begin, end), shape = tensor["data_offsets"], tensor["shape"]
    if min(begin, *shape, 0) < 0 or math.prod(shape) > 8 * (end - begin):
        raise ValueError(f"shape {shape} has not {end - begin} bytes")
    return int(end)


def _absence(path: Path) -> str:
    """Return what is wrong with a path that is not a model's directory, and the way out, for an error's message."""
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return "GGUF is not read here: take llama.cpp, or the checkpoint that it was made of"
    if (path / "adapter_config.json").is_file():
        return "an adapter (LoRA) without its model: merge the two first, as PEFT's merge_and_unload does"
    if path.is_file():
        return "a file, where a directory with config.json is expected"
    if path.is_dir():
        return f"no config.json there; {COMPLETE}"
    near = next((each for each in path.parents if each.is_dir()), Path("/"))
    if path.is_absolute():
        return f"no such directory: {near} has no {path.relative_to(near).parts[0]}; one with config.json is expected"
    return "no such directory, and no id of the hub (NAMESPACE/NAME)"


def _other_numbers(method: str) -> str:
    """Return the fault of a checkpoint whose weights are quantized by `method`, with advice, for an error's message."""
    ways = ["the checkpoint that it was made of, with --dtype int8 on a CPU", f"vLLM, which reads {method}"]
    if "fp8" in method:
        ways.insert(1, "on Neuron, what `specdec rescale_fp8` makes of it")
    return f"its weights are quantized ({method}), which is not read here: take {', or '.join(ways)}"
