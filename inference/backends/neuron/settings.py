"""From our configuration to the keyword arguments of NxDI's NeuronConfig. Values are what JSON can hold.

Owns the widths: K is NxDI's `speculation_length`, the tokens of one verification graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.config import ModelConfig, NeuronOptions
from inference.errors import ConfigError

EAGLE_METHODS = ("eagle", "eagle3")
DEFAULT_DTYPE = "bfloat16"
MAX_DEVICE_TOP_K = 256
"""NxDI's default of global_topk."""
SAMPLES = {"do_sample": True, "dynamic": True}
"""on_device_sampling_config: each request's own top_k, top_p and temperature."""


def verification_width(gamma: int) -> int:
    """K of a slot model: the last committed token and gamma draft tokens; 0 where nothing is verified."""
    return gamma + 1 if gamma else 0


def slot_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """NeuronConfig of a slot model.

    Raises:
        ConfigError: neuron_config sets what a flag says already, or breaks a rule of slot models.
    """
    arguments = {**_common(config, length=length), "speculation_length": verification_width(config.neuron.gamma)}
    _check_slot_rules(config.neuron.overrides, arguments)
    merged = _merged(arguments, config)
    _check_sequence_parallel(merged)
    return merged


def target_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """NeuronConfig of a target alone whose tokens the device chooses, one per pass.

    Raises:
        ConfigError: as for `slot_arguments`.
    """
    _check_memory(config.neuron.overrides)
    _check_sampling(config, is_greedy_only=False)
    arguments = {**_common(config, length=length), "speculation_length": 0, "on_device_sampling_config": SAMPLES}
    merged = _merged(arguments, config)
    _check_sequence_parallel(merged)
    return merged


def host_chooses(config: ModelConfig) -> bool:
    """Whether a pair's tokens are the host's choice, from the target's logits."""
    return config.neuron.method == "fused" and not config.neuron.device_sampling


def fused_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """NeuronConfig of the target in NxDI's fused graph; the draft's is a copy that NxDI's seam alters.

    Raises:
        ConfigError: as for `slot_arguments`, or the mode cannot do what neuron_config asks.
    """
    options = config.neuron
    if options.gamma < 2:
        raise ConfigError(f"speculation_length {options.gamma} is below 2: NxDI's fused graph needs a draft token")
    arguments = {**_common(config, length=length), "speculation_length": options.gamma, "on_device_sampling_config": {}}
    arguments |= {"enable_fused_speculation": True, "output_logits": host_chooses(config)}
    if options.method in EAGLE_METHODS:
        is_tree = bool(options.overrides.get("token_tree_config"))
        arguments |= {"enable_eagle_speculation": True, "on_device_sampling_config": {} if is_tree else SAMPLES}
    if options.method == "eagle3":
        arguments |= {"is_eagle3": True, "sequence_parallel_enabled": True, "enable_eagle_draft_input_norm": True}
    _check_fused_rules(config)
    merged = _with_eagle_gather(_merged(arguments, config))
    _check_buckets(merged, options.gamma)
    _check_sequence_parallel(merged)
    return merged


def _with_eagle_gather(arguments: dict[str, Any]) -> dict[str, Any]:
    """Under sequence parallelism NxDI gathers an EAGLE draft's embeddings, which it has not scattered: but not so."""
    if not (arguments.get("enable_eagle_speculation") and arguments.get("sequence_parallel_enabled")):
        return arguments
    if (factor := arguments.get("cc_pipeline_tiling_factor", 1)) != 1:
        raise ConfigError(
            f"neuron_config: cc_pipeline_tiling_factor {factor}: EAGLE with sequence_parallel_enabled needs 1"
        )
    return {**arguments, "cc_pipeline_tiling_factor": 1}


def medusa_arguments(config: ModelConfig, *, length: int) -> dict[str, Any]:
    """NeuronConfig of a target with Medusa heads; tree and widths come from neuron_config.

    Raises:
        ConfigError: as for `slot_arguments`.
    """
    overrides = config.neuron.overrides
    _check_memory(overrides)
    if overrides.get("on_device_sampling_config"):
        raise ConfigError(
            "neuron_config: speculation_method medusa is greedy only: leave out on_device_sampling_config"
        )
    ranks = 1 + max(rank for path in overrides["medusa_tree"] for rank in path)
    # Above 1, or NxDI's sampler would give one token of each head, not its best ones.
    arguments = {
        **_common(config, length=length),
        "is_medusa": True,
        "on_device_sampling_config": {"top_k": max(2, ranks)},
    }
    merged = _merged({**arguments, "speculation_length": 0}, config)
    if merged.get("sequence_parallel_enabled"):
        raise ConfigError("neuron_config: speculation_method medusa fails with sequence_parallel_enabled: leave it out")
    _check_buckets(merged, int(overrides["medusa_speculation_length"]))
    return merged


def device_top_k(arguments: Mapping[str, Any]) -> int:
    """So many tokens sampling on the device looks at; 0 if a NeuronConfig's arguments ask for none."""
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
        "ctx_batch_size": 1,  # a prompt is read alone
        "tkg_batch_size": num_slots,
        "max_batch_size": num_slots,
        "is_continuous_batching": num_slots > 1,
        "apply_seq_ids_mask": True,  # without it a batch that is not full overwrites the other slots
        "padding_side": "right",
        "seq_len": length,
        "max_context_length": length,
        # NxDI's CPU mode has one mask, as long as the longest bucket, and fails in all others.
        "enable_bucketing": not config.neuron.overrides.get("on_cpu"),
        "torch_dtype": DEFAULT_DTYPE if config.dtype == "auto" else config.dtype,
        "save_sharded_checkpoint": True,  # else the artifacts need the checkpoint, and shard it at every start
    }


_MODES = (
    *("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3", "is_eagle_draft", "is_medusa"),
    "output_logits",
)

# Set by a flag, which is named; a second value in neuron_config could only contradict it.
_BY_FLAG = {
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
    "enable_fused_speculation": "--speculation_method",
    "enable_eagle_speculation": "--speculation_method",
    "is_eagle3": "--speculation_method",
    "is_eagle_draft": "--speculation_method",
    "is_medusa": "--speculation_method",
    "apply_seq_ids_mask": "nothing: it is true, or live slots would be overwritten",
    "padding_side": "nothing: it is right",
    "save_sharded_checkpoint": "nothing: it is true, so that artifacts are complete",
}


def _merged(arguments: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    lengths = {"n_positions": arguments["seq_len"], "max_length": arguments["seq_len"]}
    fixed = {**dict.fromkeys(_MODES, False), **lengths, **arguments}
    for name, value in config.neuron.overrides.items():
        if name in _BY_FLAG and fixed.get(name, value) != value:
            flag = _BY_FLAG[name]
            raise ConfigError(f"neuron_config: {name} {value} contradicts {fixed[name]}, which is set by {flag}")
    return {**arguments, **config.neuron.overrides}


def _check_slot_rules(overrides: Any, arguments: dict[str, Any]) -> None:
    width, num_slots = arguments["speculation_length"], arguments["batch_size"]
    if overrides.get("on_device_sampling_config"):
        why = "tokens are chosen on the host, unless --device_sampling is given"
        raise ConfigError(f"neuron_config: on_device_sampling_config does not go with method vanilla: {why}")
    _check_memory(overrides)
    buckets = overrides.get("token_generation_buckets") or []
    if overrides.get("spec_batch_size", num_slots) < num_slots and len(buckets) != 1:
        raise ConfigError("neuron_config: spec_batch_size below --batch needs exactly one of token_generation_buckets")
    _check_buckets({**arguments, **overrides}, width)


def _check_memory(overrides: Any) -> None:
    """Every call names slots and positions, and another batch than the one before."""
    for name in ("async_mode", "is_prefix_caching", "is_block_kv_layout", "chunked_prefill_config"):
        if overrides.get(name):
            raise ConfigError(f"neuron_config: {name} does not go with this server, which schedules slots by itself")


def _check_buckets(arguments: dict[str, Any], width: int) -> None:
    """NxDI takes a prompt padded to K tokens for a verification."""
    if width and width in (arguments.get("context_encoding_buckets") or [arguments["max_context_length"]]):
        raise ConfigError(f"neuron_config: a context bucket of {width} tokens would be taken for a verification pass")


def _check_sequence_parallel(arguments: dict[str, Any]) -> None:
    """Every core takes an equal part of a prompt, padding included."""
    tp_degree = arguments["tp_degree"]
    buckets = arguments.get("context_encoding_buckets") or [arguments["max_context_length"]]
    uneven = [bucket for bucket in buckets if bucket % tp_degree]
    if arguments.get("sequence_parallel_enabled") and uneven:
        raise ConfigError(
            f"neuron_config: sequence_parallel_enabled: tp_degree {tp_degree} does not divide prompts of {uneven[0]} "
            "tokens: set --sequence_length, max_context_length or context_encoding_buckets"
        )


def _check_fused_rules(config: ModelConfig) -> None:
    options = config.neuron
    _check_memory(options.overrides)
    _check_sampling(config, is_greedy_only=options.method not in EAGLE_METHODS)
    if options.overrides.get("token_tree_config") and options.method != "eagle":
        raise ConfigError(f"neuron_config: token_tree_config goes with eagle, not with {options.method}")
    _check_token_tree(options.overrides.get("token_tree_config"), options)
    if options.method == "eagle3" and options.overrides.get("sequence_parallel_enabled") is False:
        raise ConfigError("neuron_config: speculation_method eagle3 fails without sequence_parallel_enabled")
    if options.method == "eagle3" and options.overrides.get("enable_eagle_draft_input_norm") is False:
        raise ConfigError(
            "neuron_config: without enable_eagle_draft_input_norm NxDI leaves out an EAGLE3 draft's norms"
        )


def _check_sampling(config: ModelConfig, *, is_greedy_only: bool) -> None:
    sampling = config.neuron.overrides.get("on_device_sampling_config") or {}
    if sampling.get("do_sample") and is_greedy_only:
        raise ConfigError(
            f"neuron_config: do_sample: speculation_method {config.neuron.method} is greedy on the device"
        )
    if sampling.get("dynamic") and not sampling.get("do_sample"):
        raise ConfigError(
            "neuron_config: dynamic without do_sample samples the first token of a prompt alone: set both, or neither"
        )
    if sampling.get("deterministic"):
        raise ConfigError(
            "neuron_config: deterministic takes 0.5 for every random number: the law would not be the target's"
        )
    if sampling.get("do_sample") and not sampling.get("dynamic"):
        raise ConfigError("neuron_config: do_sample needs dynamic, or NxDI ignores what a request asks for")


def _check_token_tree(tree: Mapping[str, Sequence[str]] | None, options: NeuronOptions) -> None:
    """A pass of NxDI takes as many tokens as the tree has nodes."""
    if not tree:
        return
    if (options.overrides.get("on_device_sampling_config") or {}).get("do_sample"):
        raise ConfigError("neuron_config: token_tree_config is greedy only: leave out do_sample")
    nodes = {str(node) for parent, children in tree.items() for node in (parent, *children)}
    if len(nodes) != options.gamma:
        raise ConfigError(
            f"neuron_config: token_tree_config has {len(nodes)} nodes, its root included: "
            f"speculation_length must be as many, not {options.gamma}"
        )
