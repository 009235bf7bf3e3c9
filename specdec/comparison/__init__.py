"""Comparison of all topologies on this machine, at equal tokens (compare_architectures.py).

Does not know: anything about the servers except their command line and their API.
Start reading: `app.py`, then `run/measurement.py`.
"""
