"""Backends over models of NxDI (NxD Inference, AWS's library) for Neuron devices, and its fused speculation graphs.

Does not know NxDI at import: the package is imported when a model is loaded. docs/neuron.md has the details.
Start reading: `backend.py`, then `graphs/application.py` and `decoders/graph_decoder.py`.
"""
