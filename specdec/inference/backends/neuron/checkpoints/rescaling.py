"""Conversion of checkpoints from OCP's E4M3 to Neuron's FP8_EXP4, file by file: values halved, scales doubled.

NxD's README_rescaling_fp8_for_neuron.md divides by 448/240, which rounds every value; a division by 2 changes only
the exponent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.inference.backends.neuron.checkpoints.fp8 import HALVED, has_nan, num_lost
from specdec.inference.backends.neuron.checkpoints.fp8_checkpoint import MARK, Plan, planned
from specdec.inference.backends.neuron.checkpoints.shards import bytes_of, open_shard, read_json
from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.errors import ConfigError

PROGRESS = "fp8_rescaling.progress"
"""Name of the JSON file with notes on finished files. It does not end with .json, since the notes hold times, and
`model_id_of` hashes all files that do."""
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # their content was not rescaled


def rescale(model: Path, output: Path) -> Iterator[str]:
    """Write a checkpoint that Neuron can read, continuing an earlier run; yield a line of text per file, then a total.

    Args:
        output: folder of the new checkpoint; config.json is written last, with `MARK`.

    Raises:
        ConfigError: the model is not an fp8 checkpoint, holds NaN or was rescaled before; or a file cannot be read or
            written.
    """
    config, shards = _config_of(model, output), CheckpointFiles(model).weights
    if missing := [shard for shard in shards if not shard.is_file()]:
        raise ConfigError(f"{missing[0]} cannot be read: there is no such file")
    plan = planned(model)
    try:
        output.mkdir(parents=True, exist_ok=True)
        done = _done_before(shards, output)
        for number, shard in enumerate(shards, 1):
            state = "done before" if shard.name in done else _summary(_do(shard, output, plan, done))
            yield f"{number}/{len(shards)} {shard.name}  {state}"
        total = {each: sum(note[each] for note in done.values()) for each in ("num_values", "num_lost")}
        _copy_others(model, output)
        _write_json(output / "config.json", {**config, MARK: {"maximum": 240, **total}})
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    yield f"{output}  {_summary(total)}"


def _do(shard: Path, output: Path, plan: Plan, done: dict[str, Any]) -> Mapping[str, int]:
    """Rescale one file and note it as done; return how many fp8 weights it has, and how many lost their lowest bit.

    Args:
        shard: file of the old checkpoint.
        output: folder of the new one.
        plan: which tensors change.
        done: notes on finished files by name, to which this file's is added.

    Returns:
        The numbers, as `num_values` and `num_lost`.
    """
    (output / "config.json").unlink(missing_ok=True)  # it describes an earlier state of the model
    source = _stamp(shard)
    counts = _rescaled(shard, output / shard.name, plan)
    done[shard.name] = {**counts, "source": source}
    _write_json(output / PROGRESS, done)
    return counts


def _summary(counts: Mapping[str, int]) -> str:
    return f"{counts['num_values']} fp8 values, {counts['num_lost']} of them, near 0, lost a bit"


def _config_of(model: Path, output: Path) -> dict[str, Any]:
    if model.resolve() == output.resolve():
        raise ConfigError(f"--output {output} is the model itself")
    if MARK in (config := read_json(model / "config.json")):
        raise ConfigError(f"{model} was rescaled before ({MARK} in its config.json): twice would be too small a range")
    if (output / "config.json").exists() and MARK not in read_json(output / "config.json"):
        raise ConfigError(f"--output {output} holds another checkpoint")
    return config


def _stamp(shard: Path) -> list[int]:
    return [shard.stat().st_size, shard.stat().st_mtime_ns]


def _done_before(shards: Sequence[Path], output: Path) -> dict[str, Any]:
    """Return the notes on finished files of an earlier run, without those whose source file has changed since.

    Raises:
        ConfigError: the notes name a file that is not among the shards, so `output` belongs to another checkpoint.
    """
    noted = read_json(output / PROGRESS) if (output / PROGRESS).exists() else {}
    if noted.keys() - {shard.name for shard in shards}:
        raise ConfigError(f"--output {output} holds parts of another checkpoint")
    return {shard.name: noted[shard.name] for shard in shards if _is_done(noted.get(shard.name), shard, output)}


def _is_done(note: Any, shard: Path, output: Path) -> bool:
    return isinstance(note, dict) and note.get("source") == _stamp(shard) and (output / shard.name).exists()


def _rescaled(source: Path, destination: Path, plan: Plan) -> dict[str, int]:
    """Write the rescaled copy of one safetensors file; return how many fp8 values it has, and how many lost a bit.

    The copy gets its final name once it is complete. The numbers are `num_values` and `num_lost`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part, counts = destination.with_name(f"{destination.name}.part"), {"num_values": 0, "num_lost": 0}
    try:
        with open_shard(source) as shard:
            tensors = {name: _changed(name, shard.get_tensor(name), plan, counts) for name in shard.keys()}  # noqa: SIM118
            save_file(tensors, part, metadata=shard.metadata())
    except SafetensorError as error:
        raise ConfigError(f"{part} cannot be written: {error}") from error
    shutil.copymode(source, part)  # safetensors makes it readable by this user alone
    with part.open("rb") as written:
        os.fsync(written.fileno())  # else the renamed file may be empty after a crash of the machine
    part.replace(destination)
    return counts


def _changed(name: str, tensor: Any, plan: Plan, counts: dict[str, int]) -> Any:
    """Return a tensor halved or doubled as the plan says, or as it is; count its fp8 values.

    Args:
        counts: `num_values`, of fp8 values, and `num_lost`, of those that lost a bit; this tensor's are added.

    Raises:
        ConfigError: a doubled scale is not finite, or a weight holds NaN.
    """
    import torch

    if name in plan.scales:
        if not (twice := tensor * 2).isfinite().all():
            raise ConfigError(f"{name} is too large to be doubled in {tensor.dtype}, or not finite")
        return twice
    if name not in plan.weights or not tensor.numel():
        return tensor
    data = bytes_of(tensor)
    if has_nan(data):
        raise ConfigError(f"{name} holds NaN (0x7f or 0xff): the checkpoint is damaged, or not E4M3")
    counts["num_values"] += len(data)
    counts["num_lost"] += num_lost(data)
    return torch.frombuffer(bytearray(data.translate(HALVED)), dtype=tensor.dtype).reshape(tensor.shape)


def _copy_others(model: Path, output: Path) -> None:
    for file in model.iterdir():
        if file.is_file() and file.suffix not in _OTHER_WEIGHTS and file.name not in ("config.json", PROGRESS):
            shutil.copyfile(file, output / file.name)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(file)
