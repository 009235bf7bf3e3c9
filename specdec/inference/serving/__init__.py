"""Life cycles of servers: which models are loaded, which ports open, and how a server drains and ends.

Does not know: the command line's flags, or what tokens are.
Start reading: `host.py`, then `target.py`.
"""
