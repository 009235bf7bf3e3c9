"""Speculation: verification of draft tokens, the draft tree, and decoders and proposers over models with slots.

Does not know: the wire, the engine's loop, or whether drafting pays.
Start reading: `verify.py`, `tree.py`, then `slot_decoder.py`.
"""
