"""Completers: one over an engine here, one at a server elsewhere, and one that goes on at another server after a loss.

Does not know: which draft worker helps a request (drafting/), or how a message is written (calls/convert.py).
Start reading: `local.py` and `remote.py`, then `resuming.py`.
"""
