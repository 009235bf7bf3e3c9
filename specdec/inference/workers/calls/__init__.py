"""Everything around a call between processes: messages, statuses, callers and their rights, servers, observers.

Does not know: how a request is answered (completing/), or drafted for (drafting/).
Start reading: `convert.py`, where every message is made and read, then `status.py` and `scope.py`.
"""
