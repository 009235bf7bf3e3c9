"""Bodies of requests: their fields, limits and faults, and the one mapping of /v1/responses onto a chat.

Does not know: answers, ports, or how a request is served.
Start reading: `schema.py`; `noops.py` has the fields that change nothing.
"""
