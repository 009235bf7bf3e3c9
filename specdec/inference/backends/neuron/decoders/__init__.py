"""Decoders over NxDI's own speculation graphs: fused pairs, EAGLE, Medusa, and a target that samples on the device.

Does not know: where a compiled model is stored, and what its checkpoint holds.
Start reading: `graph_decoder.py`, then `fused.py`.
"""
