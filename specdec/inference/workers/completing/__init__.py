"""Completers, which answer requests: by an engine of this process, by one server, or by any of several servers.

Does not know: which draft worker drafts for a request (drafting/), or how messages are made (calls/convert.py).
Start reading: `local.py` and `remote.py`, then `resuming.py`.
"""
