"""vLLM's worker for this platform, whose model runner chooses tokens that do not depend on draft tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from specdec.inference.vllm.options import require_usable


def _of_platform() -> Any:
    """Return the worker class that vLLM uses on this platform if `--worker-cls` names none."""
    kind = "gpu_worker.Worker"
    if current_platform.is_cpu():
        kind = "cpu_worker.CPUWorker"
    elif current_platform.is_xpu():
        kind = "xpu_worker.XPUWorker"
    return resolve_obj_by_qualname(f"vllm.v1.worker.{kind}")


class Worker(_of_platform()):  # type: ignore[misc]
    """vLLM's worker, with this project's changes of its model runner, V1 or V2."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        require_usable(vllm_config)
        self._ours = _runner_of(vllm_config)
        super().__init__(vllm_config, *arguments, **options)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load the model, and then install this project's changes in the model runner, which is complete by then."""
        super().load_model(*arguments, **options)
        self._ours.install(self.model_runner)


def _runner_of(config: Any) -> ModuleType:
    """Return the module whose `install` patches the model runner, V1 or V2, that vLLM has chosen.

    The rule of `vllm_same_text`, that a draft token is accepted if it is the one vLLM would have drawn, is installed
    here for V2, before the runner is made.
    """
    if not config.use_v2_model_runner:
        from specdec.inference.vllm import runner_v1

        return runner_v1
    import vllm_same_text
    from specdec.inference.vllm import runner_v2

    vllm_same_text.install()
    return runner_v2
