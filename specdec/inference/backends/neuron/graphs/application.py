"""Boundary to NxDI: the choice and configuration of its classes, compiling and loading.

Everything that NxDI returns is `Any`. Apart from `fused_graph`, other modules of the package use nothing of NxDI but an
application's `forward`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from specdec.inference.backends.architectures import architecture_name
from specdec.inference.backends.devices import load_module, take_cores
from specdec.inference.backends.neuron.checkpoints.fp8_checkpoint import check_rescaled
from specdec.inference.backends.neuron.environment import (
    compiler_environment,
    require_nxdi,
    set_fp8_environment,
    toolchain,
)
from specdec.inference.backends.neuron.graphs.fused_graph import corrected
from specdec.inference.backends.neuron.graphs.parameters import check_names, parameter_names
from specdec.inference.backends.neuron.graphs.shape import SlotShape, slot_shape
from specdec.inference.backends.neuron.storage.artifacts import Wanted, artifacts_root, find_or_compile
from specdec.inference.backends.neuron.storage.foreign import check_fits, is_compiled_model
from specdec.inference.config import ModelConfig
from specdec.inference.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

MODELS = "neuronx_distributed_inference.models"

FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of model_type in config.json that are supported: families of NxDI that were tried with this project."""
QUANTIZATION_DTYPES = ("int8", "f8e4m3", "f8e5m2")
QUANTIZATION_TYPES = ("per_tensor_symmetric", "per_channel_symmetric", "blockwise_symmetric")
# Settings that use fp8 even where the weights do not.
EIGHT_BITS = ("kv_cache_quant", "kv_quant_config", "quantized_mlp_kernel_enabled", "activation_quantization_type")
FOREIGN_REMEDY = (
    "name a folder for compiled models instead, or ask for what NxDI has itself (fused or a target alone with "
    "--device_sampling, eagle, medusa, --gamma 0)"
)


@dataclass(frozen=True, slots=True)
class Compilation:
    """Model or fused pair whose configuration was checked, ready to be compiled and loaded.

    Attributes:
        application_class: NxDI's class, or one derived from it here.
        model: configuration of the model, or of a pair's target.
        config: NxDI's InferenceConfig.
        arguments: keyword arguments of NeuronConfig.
        shape: limits of the compiled graphs.
        draft: configuration of a pair's draft; None for a single model.
    """

    application_class: Any
    model: ModelConfig
    config: Any
    arguments: Mapping[str, Any]
    shape: SlotShape
    draft: ModelConfig | None = None

    @property
    def _has_own_graph(self) -> bool:
        """Return whether this project's classes compile other graphs than NxDI's own, or graphs with other results."""
        host_chooses = self.arguments.get("enable_fused_speculation") and self.arguments.get("output_logits")
        verifies = self.model.neuron.method == "vanilla" and self.arguments["speculation_length"] > 0
        return bool(host_chooses or verifies)

    @property
    def _wanted(self) -> Wanted:
        checkpoints = [model.path for model in (self.model, self.draft) if model is not None]
        if self.arguments.get("quantized"):
            checkpoints.append(Path(self.arguments["quantized_checkpoints_path"]))
        description = {
            "method": self.model.neuron.method,
            "neuron_config": self.arguments,
            "draft_tp_degree": self.draft and self.draft.neuron.tp_degree,
            **toolchain(),
            "compiler": compiler_environment(),
        }
        return Wanted(description, tuple(checkpoints))

    def compiled(self) -> Path:
        """Return the folder of the compiled model; compile the model if it is missing and the policy permits it.

        Raises:
            ConfigError: the model is missing and may not, or cannot, be compiled; or the folder holds a single model
                that another program compiled, and this model has other settings or needs a graph that it lacks.
        """
        options = self.model.neuron
        root = artifacts_root(options.artifacts)
        if is_compiled_model(root):
            if self._has_own_graph:
                raise ConfigError(
                    f"{root} was compiled by another program: it lacks a graph that {options.method} "
                    f"needs and this project alone makes: {FOREIGN_REMEDY}"
                )
            check_fits(root, self.config)
            return root
        return find_or_compile(root, self._wanted, self._compile, policy=self.model.compile_policy)

    def _compile(self, folder: Path) -> None:
        path = self.model.path
        try:
            self.application_class(str(path), self.config).compile(f"{folder}/")
        except Exception as error:  # raised by NxDI, the compiler or the system
            logger.exception("compiling %s failed", path.name)
            raise ConfigError(f"model {path}: NxDI could not compile it: {_first_line(error)}") from error

    def _on_cpu(self) -> Any:
        neuron_config = self.config.neuron_config
        if neuron_config.speculation_length > 0:
            raise ConfigError("neuron_config: on_cpu: NxDI's CPU mode does not speculate: use --gamma 0")
        if neuron_config.tp_degree > 1:
            degree = neuron_config.tp_degree
            raise ConfigError(f"neuron_config: on_cpu: tp_degree {degree} needs as many processes, a server is one")
        application = self.application_class(str(self.model.path), self.config)
        try:
            application.to_cpu()
        except (AssertionError, NotImplementedError, RuntimeError) as error:  # such as float16
            raise ConfigError(f"model {self.model.path}: NxDI's CPU mode: {_first_line(error)}") from error
        return application

    def load(self) -> Any:
        """Return an application that runs on the device, or in NxDI's CPU mode, which compiles nothing.

        Raises:
            ConfigError: the cores do not suffice, or the model cannot be compiled or run in CPU mode.
        """
        if self.arguments.get("on_cpu"):
            return self._on_cpu()
        take_cores(self.model.neuron.cores, self.config.neuron_config.tp_degree)
        folder = f"{self.compiled()}/"
        application = self.application_class(folder)  # it holds the configuration too
        application.load(folder)
        return application


def slot_compilation(config: ModelConfig, model_config: PretrainedConfig, arguments: dict[str, Any]) -> Compilation:
    """Return the compilation of one model, and write its quantized checkpoint if `arguments` ask for one.

    It has graphs for prompts and for one token, and, if `arguments` ask for it, one that verifies: over
    `speculation_length` tokens in a row, or over Medusa's tree.

    Raises:
        ConfigError: NxDI is missing, or the settings cannot be used.
    """
    base, neuron_config = _prepare(config, model_config, arguments)
    nxdi_config = _inference_config(base, neuron_config, config.path)
    _quantize(base, config.path, nxdi_config, arguments)
    shape = slot_shape(model_config, arguments)
    return Compilation(_with_one_token_graph(base), config, nxdi_config, arguments, shape)


def fused_compilation(
    target: ModelConfig, draft: ModelConfig, model_config: PretrainedConfig, arguments: dict[str, Any]
) -> Compilation:
    """Return a fused pair's compilation: one graph for both models' prompts, and one that drafts and verifies.

    The target's quantized checkpoint is written if `arguments` ask for one.

    Args:
        model_config: configuration in the target's checkpoint.
        arguments: keyword arguments of the target's NeuronConfig.

    Raises:
        ConfigError: NxDI is missing, or the settings cannot be used.
    """
    base, neuron_config = _prepare(target, model_config, arguments)
    draft_config = _inference_config(base, _draft_of(neuron_config, draft, arguments), draft.path)
    _check_fused_qkv(arguments, "draft_model_modules_to_not_convert", draft_config.num_hidden_layers)
    nxdi_config = _inference_config(base, neuron_config, target.path)
    pair = load_module(f"{MODELS}.config").FusedSpecNeuronConfig
    nxdi_config.fused_spec_config = pair(base._model_cls, draft_config=draft_config, draft_model_path=str(draft.path))
    _quantize(base, target.path, nxdi_config, arguments)
    # Each pair has a class of its own: NxDI writes attributes of the class while it loads a pair.
    own = not arguments.get("enable_eagle_speculation")
    fused = corrected(base, host_chooses=arguments["output_logits"]) if own else type(base.__name__, (base,), {})
    return Compilation(fused, target, nxdi_config, arguments, slot_shape(model_config, arguments), draft)


def _prepare(config: ModelConfig, model_config: PretrainedConfig, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return NxDI's class of the model, and a NeuronConfig made from `arguments`.

    Raises:
        ConfigError: NxDI is missing, or the settings cannot be used.
    """
    _check_quantization(arguments)
    _check_fused_qkv(arguments, "modules_to_not_convert", model_config.num_hidden_layers)
    require_nxdi()
    base = _base_class(model_config)
    config_class = base.get_config_cls().get_neuron_config_cls()
    names = parameter_names(config_class)
    check_names(config.neuron.overrides, names)
    if arguments.get("kv_cache_quant") and "kv_quant_config" in names and not arguments.get("kv_quant_config"):
        raise ConfigError(
            'neuron_config: kv_cache_quant alone has no effect: add kv_quant_config, such as {"direct_cast": true}'
        )
    try:
        return base, config_class(**copy.deepcopy(arguments))
    except (AssertionError, TypeError, ValueError) as error:  # NxDI's errors for settings that exclude each other
        raise ConfigError(f"neuron_config: {_first_line(error)}") from error


def _base_class(model_config: PretrainedConfig) -> Any:
    """Return NxDI's class for a model type, found by NxDI's naming convention.

    NxDI's own table would import all families, and packages for images.

    Raises:
        UnsupportedModelError: the model type is not one of `FAMILIES`.
    """
    kind = str(model_config.model_type)
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(
            f"{architecture_name(model_config)} is not supported by backend neuron: model types are {known}"
        )
    name = "".join(part.title() for part in kind.split("_"))
    return getattr(load_module(f"{MODELS}.{kind}.modeling_{kind}"), f"Neuron{name}ForCausalLM")


def _with_one_token_graph(base: Any) -> Any:
    """Return a class derived from `base` that also has a graph for one token.

    With a speculation_length above 0, NxDI itself builds none.
    """

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        base.__init__(self, *arguments, **keywords)
        if self.neuron_config.speculation_length > 0:
            self.enable_token_generation()

    return type(base.__name__, (base,), {"__init__": __init__})


def _inference_config(base: Any, neuron_config: Any, path: Path) -> Any:
    load_pretrained_config = load_module("neuronx_distributed_inference.utils.hf_adapter").load_pretrained_config
    return base.get_config_cls()(neuron_config, load_config=load_pretrained_config(str(path)))


def _draft_of(neuron_config: Any, config: ModelConfig, arguments: dict[str, Any]) -> Any:
    """Return the draft's NeuronConfig: a copy of the target's, with the few settings in which a draft differs.

    Args:
        neuron_config: the target's NeuronConfig.
        config: configuration of the draft.
        arguments: keyword arguments of which the target's NeuronConfig was made.
    """
    draft = copy.deepcopy(neuron_config)
    draft.tp_degree = config.neuron.tp_degree
    draft.enable_fused_speculation = False
    draft.output_logits = False
    if arguments.get("enable_eagle_speculation"):
        draft.is_eagle_draft = True
    else:
        draft.speculation_length = 0
    if arguments.get("draft_model_modules_to_not_convert"):
        draft.modules_to_not_convert = arguments["draft_model_modules_to_not_convert"]
    return draft


def _check_quantization(arguments: dict[str, Any]) -> None:
    dtype, kind = arguments.get("quantization_dtype", "int8"), arguments.get("quantization_type", QUANTIZATION_TYPES[0])
    if dtype not in QUANTIZATION_DTYPES:
        raise ConfigError(f"neuron_config: quantization_dtype {dtype} is none of {', '.join(QUANTIZATION_DTYPES)}")
    if kind not in QUANTIZATION_TYPES:
        raise ConfigError(f"neuron_config: quantization_type {kind} is none of {', '.join(QUANTIZATION_TYPES)}")
    if arguments.get("quantized"):
        for fault in _quantization_faults(arguments, dtype=dtype, kind=kind):
            raise ConfigError(f"neuron_config: {fault}")
        if dtype == "f8e4m3":
            check_rescaled(Path(arguments["quantized_checkpoints_path"]))
    if (arguments.get("quantized") and dtype.startswith("f8")) or any(map(arguments.get, EIGHT_BITS)):
        set_fp8_environment()


def _quantization_faults(arguments: dict[str, Any], *, dtype: str, kind: str) -> Iterator[str]:
    """Yield faults of the settings of quantization, with some of which NxDI would produce wrong tokens."""
    remedy = "set quantization_type per_channel_symmetric"
    if not arguments.get("quantized_checkpoints_path"):
        yield "quantized needs quantized_checkpoints_path (written if it is not there)"
    if kind == "per_tensor_symmetric" and arguments.get("modules_to_not_convert"):
        yield f"modules_to_not_convert: NxDI quantizes these too with quantization_type {kind}: {remedy}"
    if kind == "per_tensor_symmetric" and dtype.startswith("f8"):
        yield f"quantization_dtype {dtype}: NxDI cannot shard its scales with quantization_type {kind}: {remedy}"
    if arguments.get("enable_fused_speculation") and not arguments.get("draft_model_modules_to_not_convert"):
        yield "a quantized pair needs draft_model_modules_to_not_convert, all of the draft's, which is not quantized"


def _check_fused_qkv(arguments: dict[str, Any], parameter: str, num_layers: int) -> None:
    """Refuse a list of unquantized modules in which an entry is only a part of the name of a layer's attention.

    The list is the NeuronConfig argument `parameter`. It matters only if the model is quantized and has fused_qkv.

    NxDI's models take each entry for a part of a name, its reader of checkpoints for the whole name. So such a list
    would lead to a KeyError, after hours of compiling.

    Raises:
        ConfigError: the list has such an entry, but not the whole name.
    """
    entries = arguments.get(parameter) or ()
    for name in (f"layers.{layer}.self_attn" for layer in range(num_layers)):
        is_left_out = any(entry in f"{name}.qkv_proj.Wqkv" for entry in entries)
        if arguments.get("quantized") and arguments.get("fused_qkv") and is_left_out and name not in entries:
            raise ConfigError(f"neuron_config: {parameter} with fused_qkv: NxDI needs {name} by this whole name")


def _quantize(base: Any, path: Path, nxdi_config: Any, arguments: dict[str, Any]) -> None:
    """Write a quantized copy of the checkpoint at `path`, if `arguments` ask for one and it does not exist.

    Args:
        base: NxDI's class of the model, which quantizes.
        arguments: keyword arguments of NeuronConfig; `quantized_checkpoints_path` is the place of the copy.

    Raises:
        ConfigError: NxDI cannot write it.
    """
    if not arguments.get("quantized") or Path(arguments["quantized_checkpoints_path"]).exists():
        return
    where = Path(arguments["quantized_checkpoints_path"])
    logger.info("model %s: writing its quantized checkpoint to %s", path.name, where)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        base.save_quantized_state_dict(str(path), nxdi_config)
    except Exception as error:  # raised by NxDI or the system
        logger.exception("quantizing %s failed", path.name)
        raise ConfigError(f"quantized_checkpoints_path {where} cannot be written: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
