"""Start of every Python process with this folder on PYTHONPATH: vLLM's runner V2 on a CPU, by Triton's interpreter.

vLLM takes Triton on a CPU only if Triton has a backend for it, which the published packages lack. The interpreter needs
none: it runs kernels as Python, slowly. The name of this file is Python's own.
"""

import os
import types
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))
    masked_load = InterpreterBuilder.create_masked_load

    def create_masked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        """Load with a boolean mask: Triton 3.9 makes integers of the masks in vLLM's look-up, and then refuses them."""
        mask.data = mask.data.astype(bool)
        return masked_load(builder, pointers, mask, *others)

    InterpreterBuilder.create_masked_load = create_masked_load
