"""Life cycles of servers: what is loaded, which ports open, what observes, and the one way to drain and end.

Does not know: parsed flags, and what tokens are.
Start reading: `host.py`, then `target.py`.
"""
