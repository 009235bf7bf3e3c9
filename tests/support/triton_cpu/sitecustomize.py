"""Lets vLLM's runner V2 run on a CPU, by Triton's interpreter, in each Python with this folder on PYTHONPATH.

vLLM takes Triton on a CPU only if Triton has a backend for it, which the published packages lack. The interpreter needs
none: it runs kernels as Python, slowly. Python runs a file of this name at its start.
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
        """Let loops over `tl.range` count in tensors, as compiled ones do: vLLM's top_k and top_p cast the number."""
        patch_lang_core(lang, scope)
        numbers = lang.range
        scope.set_attr(lang, "range", lambda *ends, **hints: map(interpreter._implicit_cvt, numbers(*ends, **hints)))

    interpreter._patch_lang_core = counting_in_tensors

    masked_store = interpreter.InterpreterBuilder.create_masked_store

    def with_mask(self: Any, places: Any, value: Any, mask: Any, *others: Any) -> Any:
        """Store with a mask of numbers too, as compiled kernels do."""
        mask.data = mask.data.astype(bool)
        return masked_store(self, places, value, mask, *others)

    interpreter.InterpreterBuilder.create_masked_store = with_mask
