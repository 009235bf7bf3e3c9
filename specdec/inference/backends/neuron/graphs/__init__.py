"""Compiled graphs: NxDI's settings and classes, the limits of a graph, and the tensors of its calls.

Does not know: which sequence is in which slot, or how tokens are chosen.
Start reading: `application.py`, then `settings.py` and `calls.py`.
"""
