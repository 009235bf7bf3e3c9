"""Comparison of topologies, the ways to place draft and target, in speed at equal tokens (compare_architectures.py).

Does not know: anything about the servers except their command line and their API.
Start reading: `app.py`, then `run/measurement.py`.
"""
