"""Sending of requests to other processes, and answering of theirs, by gRPC or by an engine in this process.

Its packages share the interfaces in `completion.py`. `calls` has what the others use: messages, gRPC statuses, rights,
and a request's deadline and limits. `completing` answers requests. `drafting` connects draft workers with targets.

Does not know: any algorithm; it translates between gRPC messages and the engine.
Start reading: `completion.py`, then `completing/local.py` and `completing/remote.py`.
"""
