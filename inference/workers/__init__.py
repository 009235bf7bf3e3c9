"""Requests and answers on their way between processes, in three rooms; `completion.py` is the contract of all of them.

`calls` stands lowest: messages, statuses, rights, and the scope of a request. `completing` answers a request here or at
other servers. `drafting` joins draft workers to targets.

Does not know: any algorithm; it translates between wire and engine.
Start reading: `completion.py`, then `completing/local.py` and `completing/remote.py`.
"""
