"""Worker class for vLLM's servers that run without our front: it installs our choice of tokens by itself."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from specdec.inference.vllm.options import INSTALL, require_usable, take_runner


def _of_platform() -> Any:
    """Return the class that vLLM takes where `--worker-cls` names none."""
    kind = "gpu_worker.Worker"
    if current_platform.is_cpu():
        kind = "cpu_worker.CPUWorker"
    elif current_platform.is_xpu():
        kind = "xpu_worker.XPUWorker"
    return resolve_obj_by_qualname(f"vllm.v1.worker.{kind}")


class Worker(_of_platform()):  # type: ignore[misc]
    """Worker with our choice."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        require_usable(vllm_config)
        self._extension = take_runner(vllm_config)
        super().__init__(vllm_config, *arguments, **options)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load the model, and put our choice into its runner."""
        super().load_model(*arguments, **options)
        getattr(self._extension, INSTALL)(self)
