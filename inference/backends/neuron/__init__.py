"""Backends over NxDI's models, compiled for AWS Neuron devices, and its fused speculation graphs.

Does not import NxDI before it loads a model. docs/neuron.md has the details.
Start reading: `backend.py`, then `graphs/application.py` and `decoders/graph_decoder.py`.
"""
