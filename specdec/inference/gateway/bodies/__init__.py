"""Bodies of HTTP requests: their fields and limits; those of /v1/responses and /v1/messages become a chat's body.

Does not know: answers, ports, or how a request is served.
Start reading: `schema.py`; `noops.py` has the fields that change nothing.
"""
