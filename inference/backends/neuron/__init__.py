"""AWS Trainium and Inferentia through NxD Inference (NxDI): slot models, and NxDI's fused speculation.

Nothing here imports a Neuron package until a model is loaded. `docs/neuron.md` says what was verified and what was not.
"""
