"""Start of every Python process with this folder on PYTHONPATH: vLLM's runner V2 on a CPU, by Triton's interpreter.

vLLM takes Triton on a CPU only if Triton has a backend for it, which the published packages lack. The interpreter needs
none: it runs kernels as Python, slowly. The name of this file is Python's own.
"""

import os
import types

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))
