"""Translation of a model's configuration to keyword arguments of NxDI's NeuronConfig, all of them values of JSON.

Decides K, the number of tokens of a verification graph, which NxDI calls `speculation_length`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from specdec.inference.backends.neuron.graphs.medusa_tree import num_ranks
from specdec.inference.config import ModelConfig, NeuronOptions
from specdec.inference.errors import ConfigError

EAGLE_METHODS = ("eagle", "eagle3")
DEFAULT_DTYPE = "bfloat16"
MAX_DEVICE_TOP_K = 256
"""Number of likeliest tokens from which a device samples, by NxDI's default of global_topk."""
SAMPLES = {"do_sample": True, "dynamic": True}
"""Value of on_device_sampling_config with which each request has its own top_k, top_p and temperature."""
_TILING = "cc_pipeline_tiling_factor"


def verification_width(gamma: int) -> int:
    """Return how many tokens verify `gamma` draft tokens in a pass: these and a committed one; 0 if gamma is 0."""
    return gamma + 1 if gamma else 0


def slot_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """Return the NeuronConfig arguments of a model that returns logits, from which the host chooses.

    Args:
        length: positions of a slot.

    Raises:
        ConfigError: neuron_config contradicts a flag, or asks for something that such a model cannot do.
    """
    width = verification_width(config.neuron.gamma)
    return _arguments(config, {"speculation_length": width}, _slot_faults(config), length=length, width=width)


def target_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """Return the NeuronConfig arguments of a target without a draft, whose device chooses one token per pass.

    Args:
        length: positions of a slot.

    Raises:
        ConfigError: neuron_config contradicts a flag, or asks for something that such a model cannot do.
    """
    own = {"speculation_length": 0, "on_device_sampling_config": SAMPLES}
    return _arguments(config, own, _sampling_faults(config, is_greedy_only=False), length=length)


def host_chooses(config: ModelConfig) -> bool:
    """Return whether the host chooses a pair's tokens, from the target's logits, instead of the graph."""
    return config.neuron.method == "fused" and not config.neuron.device_sampling


def fused_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """Return the NeuronConfig arguments of the target in NxDI's graph of a fused pair.

    The draft's NeuronConfig is made from a copy of the target's (`application.py`).

    Args:
        length: positions of a slot.

    Raises:
        ConfigError: neuron_config contradicts a flag, or asks for something that the speculation method cannot do; or
            the speculation length leaves no room for a draft token.
    """
    options = config.neuron
    if options.gamma < 2:
        raise ConfigError(f"speculation_length {options.gamma} is below 2: NxDI's fused graph needs a draft token")
    own: dict[str, Any] = {"speculation_length": options.gamma, "on_device_sampling_config": {}}
    own |= {"enable_fused_speculation": True, "output_logits": host_chooses(config)}
    if options.method in EAGLE_METHODS:
        is_tree = bool(options.overrides.get("token_tree_config"))
        own |= {"enable_eagle_speculation": True, "on_device_sampling_config": {} if is_tree else SAMPLES}
    if options.method == "eagle3":
        own |= {"is_eagle3": True, "sequence_parallel_enabled": True, "enable_eagle_draft_input_norm": True}
    return _arguments(config, own, _fused_faults(config), length=length, width=options.gamma)


def medusa_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """Return the NeuronConfig arguments of a target with Medusa heads; tree and widths come from neuron_config.

    Args:
        length: positions of a slot.

    Raises:
        ConfigError: neuron_config contradicts a flag, or asks for something that Medusa cannot do.
    """
    overrides = config.neuron.overrides
    sampling = {"top_k": num_ranks(overrides["medusa_tree"])}
    own = {"is_medusa": True, "speculation_length": 0, "on_device_sampling_config": sampling}
    width = int(overrides["medusa_speculation_length"])
    return _arguments(config, own, _medusa_faults(overrides), length=length, width=width)


def device_top_k(arguments: Mapping[str, Any]) -> int:
    """Return the number of likeliest tokens from which the device samples; 0 if the arguments ask for no sampling."""
    sampling = arguments.get("on_device_sampling_config") or {}
    return int(sampling.get("global_topk", MAX_DEVICE_TOP_K)) if sampling.get("do_sample") else 0


def _common(config: ModelConfig, *, length: int) -> dict[str, Any]:
    num_slots = config.num_slots
    if config.dtype == "int8":
        raise ConfigError(
            'dtype int8 is backend onnx\'s: here use neuron_config {"quantized": true, ...} (docs/neuron.md)'
        )
    return {
        "tp_degree": config.neuron.tp_degree,
        "batch_size": num_slots,
        "ctx_batch_size": 1,  # each prompt is read alone
        "tkg_batch_size": num_slots,
        "max_batch_size": num_slots,
        "is_continuous_batching": num_slots > 1,
        "apply_seq_ids_mask": True,  # without it a batch that is not full overwrites the other slots
        "padding_side": "right",
        "seq_len": length,
        "max_context_length": length,
        # NxDI's CPU mode has one mask, as long as the longest bucket, and fails in all other buckets.
        "enable_bucketing": not config.neuron.overrides.get("on_cpu"),
        "torch_dtype": DEFAULT_DTYPE if config.dtype == "auto" else config.dtype,
        "save_sharded_checkpoint": True,  # else the artifacts need the checkpoint, and shard it at every start
    }


_METHODS = ("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3", "is_eagle_draft", "is_medusa")
"""Parameters that are true for some speculation methods, and false for the others."""

# Parameters set by a flag, with its name; a second value in neuron_config could only contradict it.
_BY_FLAG = {
    **dict.fromkeys(_METHODS, "--speculation_method"),
    "tp_degree": "--tp_degree",
    "batch_size": "--batch",
    "ctx_batch_size": "nothing: it is 1",
    "tkg_batch_size": "--batch",
    "max_batch_size": "--batch",
    "is_continuous_batching": "--batch",
    "seq_len": "--sequence_length",
    "n_positions": "--sequence_length",
    "max_length": "--sequence_length",
    "torch_dtype": "--dtype",
    "speculation_length": "--gamma",
    "output_logits": "--device_sampling",
    "apply_seq_ids_mask": "nothing: it is true, or live slots would be overwritten",
    "padding_side": "nothing: it is right",
    "save_sharded_checkpoint": "nothing: it is true, so that artifacts are complete",
}


def _arguments(
    config: ModelConfig, own: Mapping[str, Any], faults: Iterator[str], *, length: int, width: int = 0
) -> dict[str, Any]:
    """Return all NeuronConfig arguments of a model: those of all models, those of its method (`own`), neuron_config's.

    Args:
        faults: what is wrong with neuron_config by the rules of the method; other faults are found here.
        length: positions of a slot.
        width: tokens of a verification graph; 0 without one.

    Raises:
        ConfigError: there is a fault; the message names the first one.
    """
    arguments, overrides = {**_common(config, length=length), **own}, config.neuron.overrides
    merged = {**arguments, **overrides}
    contradictions = _contradictions(arguments, overrides)
    for fault in chain(_memory_faults(overrides), faults, contradictions, _shape_faults(merged, width)):
        raise ConfigError(f"neuron_config: {fault}")
    return {**merged, _TILING: 1} if _gathers_twice(merged) else merged


def _contradictions(arguments: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    lengths = {"n_positions": arguments["seq_len"], "max_length": arguments["seq_len"]}
    fixed = {**dict.fromkeys((*_METHODS, "output_logits"), False), **lengths, **arguments}
    for name, value in overrides.items():
        if name in _BY_FLAG and fixed.get(name, value) != value:
            yield f"{name} {value} contradicts {fixed[name]}, which is set by {_BY_FLAG[name]}"


def _memory_faults(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for each setting with which NxDI would schedule requests, or place keys and values, by itself.

    This server does both: it fills each pass, and names the slots and positions of the tokens.
    """
    for name in ("async_mode", "is_prefix_caching", "is_block_kv_layout", "chunked_prefill_config"):
        if overrides.get(name):
            yield f"{name} does not go with this server, which schedules slots by itself"


def _shape_faults(arguments: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield faults of tiling, and of the lengths of prompt graphs, such as one as wide as the verification graph.

    Args:
        arguments: all NeuronConfig arguments of the model.
        width: tokens of the verification graph; 0 without one.
    """
    tp_degree = arguments["tp_degree"]
    buckets = arguments.get("context_encoding_buckets") or [arguments["max_context_length"]]
    if width and width in buckets:
        yield f"a context bucket of {width} tokens would be taken for a verification pass"
    uneven = [bucket for bucket in buckets if bucket % tp_degree]  # padding included
    if arguments.get("sequence_parallel_enabled") and uneven:
        yield (
            f"sequence_parallel_enabled: tp_degree {tp_degree} does not divide prompts of {uneven[0]} tokens: "
            "set --sequence_length, max_context_length or context_encoding_buckets"
        )
    if _gathers_twice(arguments) and (factor := arguments.get(_TILING, 1)) != 1:
        yield f"{_TILING} {factor}: EAGLE with sequence_parallel_enabled needs 1"


def _gathers_twice(arguments: Mapping[str, Any]) -> bool:
    """Return whether NxDI would gather an EAGLE draft's embeddings twice, which works only without tiling."""
    return bool(arguments.get("enable_eagle_speculation") and arguments.get("sequence_parallel_enabled"))


def _slot_faults(config: ModelConfig) -> Iterator[str]:
    overrides, num_slots = config.neuron.overrides, config.num_slots
    if overrides.get("on_device_sampling_config"):
        why = "tokens are chosen on the host, unless --device_sampling is given"
        yield f"on_device_sampling_config does not go with method vanilla: {why}"
    buckets = overrides.get("token_generation_buckets") or []
    if overrides.get("spec_batch_size", num_slots) < num_slots and len(buckets) != 1:
        yield "spec_batch_size below --batch needs exactly one of token_generation_buckets"


def _medusa_faults(overrides: Mapping[str, Any]) -> Iterator[str]:
    if overrides.get("on_device_sampling_config"):
        yield "speculation_method medusa is greedy only: leave out on_device_sampling_config"
    if overrides.get("sequence_parallel_enabled"):
        yield "speculation_method medusa fails with sequence_parallel_enabled: leave it out"


def _fused_faults(config: ModelConfig) -> Iterator[str]:
    method, overrides = config.neuron.method, config.neuron.overrides
    yield from _sampling_faults(config, is_greedy_only=method not in EAGLE_METHODS)
    if overrides.get("token_tree_config") and method != "eagle":
        yield f"token_tree_config goes with eagle, not with {method}"
    yield from _tree_faults(config.neuron)
    if method == "eagle3" and overrides.get("sequence_parallel_enabled") is False:
        yield "speculation_method eagle3 fails without sequence_parallel_enabled"
    if method == "eagle3" and overrides.get("enable_eagle_draft_input_norm") is False:
        yield "without enable_eagle_draft_input_norm NxDI leaves out an EAGLE3 draft's norms"


def _sampling_faults(config: ModelConfig, *, is_greedy_only: bool) -> Iterator[str]:
    sampling = config.neuron.overrides.get("on_device_sampling_config") or {}
    samples, dynamic = sampling.get("do_sample"), sampling.get("dynamic")
    if samples and is_greedy_only:
        yield f"do_sample: speculation_method {config.neuron.method} is greedy on the device"
    if dynamic and not samples:
        yield "dynamic without do_sample samples the first token of a prompt alone: set both, or neither"
    if sampling.get("deterministic"):
        yield "deterministic takes 0.5 for every random number: the law would not be the target's"
    if samples and not dynamic:
        yield "do_sample needs dynamic, or NxDI ignores what a request asks for"


def _tree_faults(options: NeuronOptions) -> Iterator[str]:
    """Yield faults of the token tree; a pass of NxDI takes as many tokens as the tree has nodes."""
    tree: Mapping[str, Sequence[str]] | None = options.overrides.get("token_tree_config")
    if not tree:
        return
    if (options.overrides.get("on_device_sampling_config") or {}).get("do_sample"):
        yield "token_tree_config is greedy only: leave out do_sample"
    nodes = {str(node) for parent, children in tree.items() for node in (parent, *children)}
    if len(nodes) != options.gamma:
        yield (
            f"token_tree_config has {len(nodes)} nodes, its root included: "
            f"speculation_length must be as many, not {options.gamma}"
        )
