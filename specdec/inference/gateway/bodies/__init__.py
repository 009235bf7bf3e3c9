"""Bodies of requests: their fields, limits and faults, and the mappings of /v1/responses and /v1/messages onto a chat.

Does not know: answers, ports, or how a request is served.
Start reading: `schema.py`; `noops.py` has the fields that change nothing.
"""
