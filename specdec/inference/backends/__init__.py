"""Models that keep sequences in slots: loading a model, and running one pass of it.

Does not know: sampling, requests, text. Other packages reach a backend only through `registry.py`.
Start reading: `registry.py`, then the `Backend` protocol in inference/model/slots.py;
tests/support/backend_contract.py tests each backend against it.
"""
