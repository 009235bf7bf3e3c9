"""Lets vLLM's model runner V2 run on a CPU, by Triton's interpreter, in each Python with this folder on PYTHONPATH.

vLLM uses Triton on a CPU only if Triton has a backend for CPUs, which the published packages lack. This file registers
one by name. The interpreter, which runs kernels as Python code, needs no real one. Python runs a file named
sitecustomize.py at its start.
"""

import os
import types
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.runtime import interpreter

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))
    patch_lang_core = interpreter._patch_lang_core

    def counting_in_tensors(lang: Any, scope: Any) -> None:
        """Patch Triton's language so that loops over `tl.range` count in tensors, as compiled kernels do.

        vLLM's kernels for top_k and top_p cast the loop variable, which a plain int cannot do.
        """
        patch_lang_core(lang, scope)
        numbers = lang.range
        scope.set_attr(lang, "range", lambda *ends, **hints: map(interpreter._implicit_cvt, numbers(*ends, **hints)))

    interpreter._patch_lang_core = counting_in_tensors

    masked_store = interpreter.InterpreterBuilder.create_masked_store

    def with_mask(self: Any, places: Any, value: Any, mask: Any, *others: Any) -> Any:
        """Store values where the mask is not 0: a mask may have any numbers, as in compiled kernels."""
        mask.data = mask.data.astype(bool)
        return masked_store(self, places, value, mask, *others)

    interpreter.InterpreterBuilder.create_masked_store = with_mask
