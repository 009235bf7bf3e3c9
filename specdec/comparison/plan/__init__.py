"""Plan of a comparison: flags, configuration, machines, and the grid of measurements. Starts no process.

Does not know: processes and clocks.
Start reading: `config.py`.
"""
