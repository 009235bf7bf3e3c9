"""Requests and answers between processes, in three packages that share the interfaces in `completion.py`.

`calls` has what the others use: messages, gRPC statuses, rights, and the deadline and limits of a request. `completing`
answers a request in this process or at other servers. `drafting` joins draft workers to targets.

Does not know: any algorithm; it translates between gRPC messages and the engine.
Start reading: `completion.py`, then `completing/local.py` and `completing/remote.py`.
"""
