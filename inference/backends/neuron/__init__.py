"""Backends over NxDI's models, compiled for AWS Neuron devices, and its fused speculation graphs.

Does not know: NxDI at import; it is loaded by name when a model is. docs/neuron.md has the whole.
Start reading: `backend.py`, then `graphs/application.py` and `decoders/graph_decoder.py`.
"""
