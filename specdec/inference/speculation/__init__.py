"""Speculation algorithms: verification, the draft tree, and decoders and proposers over slot models.

Does not know: the wire, the loop, or whether drafting pays.
Start reading: `verify.py`, `tree.py`, then `slot_decoder.py`.
"""
