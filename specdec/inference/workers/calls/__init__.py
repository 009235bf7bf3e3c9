"""Everything around a gRPC call: its messages and status, its caller's rights, the servers to call, and its metrics.

Does not know: how a request is answered (completing/), or drafted for (drafting/).
Start reading: `convert.py`, where every message is made and read, then `status.py` and `scope.py`.
"""
