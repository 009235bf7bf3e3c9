"""What a person with a Trainium device runs: the target alone and a fused pair, one after the other, in figures.

Starts main.py's own servers and lets `comparison` measure each as an endpoint; adds the table of docs/tutorials and the
bundle that goes with a report of a fault. Start reading: `__main__.py`.
"""
