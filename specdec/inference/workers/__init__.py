"""Requests and answers between processes, in three packages that share the interfaces in `completion.py`.

`calls` is the lowest: messages, statuses, rights, and the scope of a request. `completing` answers a request here or at
other servers. `drafting` joins draft workers to targets.

Does not know: any algorithm; it translates between wire and engine.
Start reading: `completion.py`, then `completing/local.py` and `completing/remote.py`.
"""
