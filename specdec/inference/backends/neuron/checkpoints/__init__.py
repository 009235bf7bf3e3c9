"""Checkpoints as NxDI reads them: EAGLE drafts, fp8 weights, and the rescaling of these to Neuron's format.

Does not know: NxDI, devices, and how a model is compiled.
Start reading: `fp8.py`, then `rescaling.py`.
"""
