"""Start of every Python process with this folder on PYTHONPATH: vLLM's runner V2 on a CPU, by Triton's interpreter.

vLLM takes Triton on a CPU only if Triton has a backend for it, which the published packages lack. The interpreter needs
none: it runs kernels as Python, slowly. The name of this file is Python's own.
"""

import os
import types
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.runtime import interpreter

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))
    masked_load = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        """Load with a boolean mask: Triton 3.9 turns masks of vLLM's look-up into integers, and then refuses these."""
        mask.data = mask.data.astype(bool)
        return masked_load(builder, pointers, mask, *others)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    patch_lang_core = interpreter._patch_lang_core

    def counting_in_tensors(lang: Any, scope: Any) -> None:
        """Let loops over `tl.range` count in tensors, as compiled ones do: vLLM's top_k and top_p cast the number."""
        patch_lang_core(lang, scope)
        numbers = lang.range
        scope.set_attr(lang, "range", lambda *ends, **hints: map(interpreter._implicit_cvt, numbers(*ends, **hints)))

    interpreter._patch_lang_core = counting_in_tensors
