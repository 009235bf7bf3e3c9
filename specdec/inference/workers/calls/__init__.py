"""Everything around a gRPC call: its messages and status, its caller's rights and limits, its metrics, its servers.

Does not know: how a request is answered (completing/), or where its draft tokens come from (drafting/).
Start reading: `convert.py`, where every message is made and read, then `status.py` and `scope.py`.
"""
