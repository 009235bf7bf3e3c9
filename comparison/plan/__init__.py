"""What is to be compared: flags, configuration, machines, and the grid of measurements. Starts nothing.

Does not know: processes and clocks.
Start reading: `config.py`.
"""
