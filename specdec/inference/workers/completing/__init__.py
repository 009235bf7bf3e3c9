"""Completers, which answer requests: by an engine here, by a remote server, or by a fleet that replaces a lost server.

Does not know: which draft worker helps a request (drafting/), or how a message is written (calls/convert.py).
Start reading: `local.py` and `remote.py`, then `resuming.py`.
"""
