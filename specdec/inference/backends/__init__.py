"""Models over slots and positions: loading them, and running one pass.

Does not know: sampling, sessions, text. Other packages reach a backend only through `registry.py`.
Start reading: `registry.py`, then the `Backend` protocol in inference/model/slots.py;
tests/support/backend_contract.py tests each backend against it.
"""
