"""A stand-in for a Neuron device: seven changes to NxDI (AWS's NxD Inference), which is otherwise as AWS wrote it.

1. NeuronConfig has on_cpu set, so that models take torch's operations where they would call a kernel.
2. An application's `compile` writes neuron_config.json, a model.pt that names the graphs, and the sharded weights.
3. Its `load` builds the graphs from only these files; all graphs share one KV cache.
4. A graph's wrapper runs it at its bucket's length, writes outputs that stand for the KV cache back to it, and returns
   the others, as a traced model does. So NxDI's host code runs as on a device.
5. The sampler on a CPU looks at the logits of all ranks, and gives values where they are asked for, as on a device.
6. Medusa's pass reads hidden states at an index that tracing freezes at 0.
7. Marks of layers for the compiler (in models with experts) have no effect.

Not here: the compiler, tracing, the runtime, kernels, bfloat16 as the device rounds it, time. Eager code that runs here
may fail to trace. A single process is one rank, for any tp_degree; under torchrun each process is one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

logger = logging.getLogger("nxdi_real")

N = "neuronx_distributed_inference"
CALLS: list[tuple[str, tuple[int, ...]]] = []
"""Graph and shape of input_ids of every model call in this process, in order."""
COMPILED_IN: list[str] = []
"""Work directory of every compilation in this process, in order."""
GRAPHS = {
    "context_encoding_model": "context",
    "token_generation_model": "token",
    "speculation_model": "speculation",
    "fused_speculation_model": "fused",
    "medusa_speculation_model": "medusa",
}
STATES = ("past_key_values", "rolling_buffer", "rank_util", "global_rank")
"""Parts of the names of a graph's buffers that hold state, and so are in no checkpoint."""


def change_config(module: ModuleType) -> None:
    begin = module.NeuronConfig.__init__

    @wraps(begin)
    def on_cpu(self: Any, **keywords: Any) -> None:
        begin(self, **{**keywords, "on_cpu": True})

    module.NeuronConfig.__init__ = on_cpu


def change_application(module: ModuleType) -> None:
    module.NeuronApplicationBase.compile = _compile
    module.NeuronApplicationBase.load = _load


def _compile(self: Any, compiled_model_path: str, *_: Any, **__: Any) -> None:
    from neuronx_distributed.trace.trace import get_sharded_checkpoint
    from safetensors.torch import save_file

    COMPILED_IN.append(os.environ.get("BASE_COMPILE_WORK_DIR", "the default"))
    folder = Path(compiled_model_path)
    self.config.save(compiled_model_path)
    _join_ranks(self)
    weights = self.checkpoint_loader_fn()
    instance = self.models[0].get_model_instance()
    instance.load_module()
    get_sharded_checkpoint(weights, instance.module, torch.distributed.get_rank(), self.neuron_config.tp_degree)
    _weights_file(folder).parent.mkdir(exist_ok=True)
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, _weights_file(folder))
    Path(folder, "model.pt").write_text("\n".join(wrapper.tag for wrapper in self.models))


def _load(self: Any, compiled_model_path: str, *_: Any, **__: Any) -> None:
    from safetensors.torch import load_file

    folder = Path(compiled_model_path)
    tags = [wrapper.tag for wrapper in self.models]
    if Path(folder, "model.pt").read_text().splitlines() != tags:
        raise RuntimeError(f"{folder} has other graphs than {tags}")
    _join_ranks(self)
    weights = load_file(_weights_file(folder))
    modules = [_load_graph(wrapper, weights) for wrapper in self.models]
    for module in modules[1:]:
        _share_memory(module, modules[0])
    self.is_loaded_to_neuron = True


def _load_graph(wrapper: Any, weights: dict[str, torch.Tensor]) -> Any:
    instance = wrapper.get_model_instance()
    instance.load_module()
    result = instance.module.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if not any(state in name for state in STATES)]
    if missing:
        raise RuntimeError(f"{wrapper.tag}: no weights for {missing[:4]}")
    wrapper.model, wrapper.as_device = instance.module, instance
    return instance.module


def _weights_file(folder: Path) -> Path:
    return folder / "weights" / f"tp{torch.distributed.get_rank()}_sharded_checkpoint.safetensors"


def _share_memory(module: Any, first: Any) -> None:
    """Let a graph use the KV cache (and EAGLE's buffer of hidden states) of the application's first graph, `first`."""
    for name in ("", "draft_model", "target_model"):
        part, other = (getattr(module, name), getattr(first, name)) if hasattr(module, name) else (module, first)
        if hasattr(part, "kv_mgr"):
            part.kv_mgr.past_key_values = other.kv_mgr.past_key_values
    if hasattr(module, "hidden_state_rolling_buffer"):
        module.hidden_state_rolling_buffer = first.hidden_state_rolling_buffer


def _join_ranks(application: Any) -> None:
    """Create NxD's process groups, for this process alone or, under torchrun, for all that it has started."""
    from neuronx_distributed.parallel_layers import parallel_state

    if not torch.distributed.is_initialized():
        alone: dict[str, Any] = {}
        if "WORLD_SIZE" not in os.environ:
            alone = {"store": torch.distributed.HashStore(), "world_size": 1, "rank": 0}
        torch.distributed.init_process_group("gloo", **alone)
    num_ranks = torch.distributed.get_world_size()
    for config in _configs(application):
        if config.tp_degree > num_ranks:
            logger.info("tp_degree %d runs as %d", config.tp_degree, num_ranks)
            config.tp_degree = config.world_size = config.local_ranks_size = num_ranks
    if not parallel_state.model_parallel_is_initialized():
        degree = application.neuron_config.tp_degree
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=degree, skip_collective_init=True)
    if application.fused_spec_config is not None:
        draft = application.fused_spec_config.draft_config.neuron_config
        parallel_state.initialize_speculative_draft_group(draft.tp_degree)


def _configs(application: Any) -> list[Any]:
    """Return every NeuronConfig of an application: its own, that of each graph, and those of the drafts in these."""
    owners = [application.config, *(wrapper.config for wrapper in application.models)]
    drafts = [owner.fused_spec_config.draft_config for owner in owners if owner.fused_spec_config is not None]
    return [owner.neuron_config for owner in [*owners, *drafts]]


def change_wrapper(module: ModuleType) -> None:
    wrapper = module.ModelWrapper
    run, is_neuron, forward = wrapper._forward, wrapper.is_neuron, wrapper.forward

    def has_device(self: Any) -> bool:
        return getattr(self, "as_device", None) is not None

    def run_graph(self: Any, *args: Any) -> Any:
        return _run_compiled(self, run, args) if has_device(self) else run(self, *args)

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        if has_device(self):
            CALLS.append((GRAPHS[self.tag], tuple(args[0].shape)))
        return forward(self, *args, **keywords)

    wrapper.is_neuron = lambda self: has_device(self) or is_neuron(self)
    wrapper._forward, wrapper.forward = run_graph, counted


@torch.no_grad()
def _run_compiled(wrapper: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a graph; store its outputs that are states, such as the KV cache, and return the others.

    `run` is NxDI's own `_forward` of the wrapper; it gets `args`.

    Raises:
        RuntimeError: an output at an index of NxDI's table of states has another shape than the state.
    """
    bucket = wrapper.neuron_config.buckets.index(args[1].shape[-1])
    _, places = wrapper.as_device.get(bucket)
    outputs = list(run(wrapper, *args))
    for state, place in places.items():
        if outputs[place].shape != state.shape:
            shapes = f"{tuple(outputs[place].shape)}, its state {tuple(state.shape)}"
            raise RuntimeError(f"{wrapper.tag} would not compile: output {place} has shape {shapes}")
        state.data = outputs[place]
    heads = [output.detach() for place, output in enumerate(outputs) if place not in set(places.values())]
    return heads[0] if len(heads) == 1 else heads


def change_sampler(module: ModuleType) -> None:
    from neuronx_distributed.parallel_layers import parallel_state

    top_k_masked = module.Sampler._top_k_masked

    def gathered(logits: torch.Tensor, dim: int) -> torch.Tensor:
        if parallel_state.get_tensor_model_parallel_size() == 1:
            return logits
        group = parallel_state.get_tensor_model_parallel_group()
        whole: torch.Tensor = module._gather_along_dim(logits, dim, process_group=group)
        return whole

    def best(self: Any, logits: torch.Tensor, top_k: torch.Tensor, dim: int, rank_id: Any) -> Any:
        return top_k_masked(self, gathered(logits, dim), top_k, dim, rank_id)

    def argmax(self: Any, token_logits: torch.Tensor, return_values: bool, dim: int) -> Any:
        tokens = gathered(token_logits, dim).argmax(dim)
        return (tokens, torch.ones(tokens.shape, dtype=token_logits.dtype)) if return_values else tokens

    module.Sampler._argmax_sample, module.Sampler._top_k_masked = argmax, best


def change_model(module: ModuleType) -> None:
    forward, minimum = module.NeuronBaseModel._medusa_forward, torch.min

    def frozen(tensor: torch.Tensor, *more: Any) -> Any:
        return minimum(tensor, *more) if more else torch.zeros((), dtype=tensor.dtype)

    @wraps(forward)
    def medusa_forward(self: Any, *args: Any, **keywords: Any) -> Any:
        with mock.patch.object(torch, "min", frozen):
            return forward(self, *args, **keywords)

    module.NeuronBaseModel._medusa_forward = medusa_forward


def change_markers(module: ModuleType) -> None:
    def unmarked(self: Any, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args

    module.ModuleMarkerStartWrapper.forward = module.ModuleMarkerEndWrapper.forward = unmarked


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    f"{N}.models.config": change_config,
    f"{N}.models.application_base": change_application,
    f"{N}.models.model_wrapper": change_wrapper,
    f"{N}.modules.generation.sampling": change_sampler,
    f"{N}.models.model_base": change_model,
    f"{N}.models.layer_boundary_marker": change_markers,
}
"""Functions that change a module of NxDI once it is imported, by the module's name."""
