"""What a person with a Trainium device runs: the target alone and a fused pair, one after the other, in figures.

Owns the tables of docs/tutorials and the bundle that goes with a report of a fault. Servers are main.py's own.
Start reading: `__main__.py`.
"""
