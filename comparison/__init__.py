"""compare_architectures.py: every topology measured on this machine, at equal tokens.

Does not know: anything of the servers beyond their command line and their API.
Start reading: `app.py`, then `run/measurement.py`.
"""
