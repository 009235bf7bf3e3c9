"""Every recipe that has hurt a server, against servers that others use meanwhile.

`__main__.py` starts the servers and has the bystanders: clients that must get their tokens, probes of health, memory.
`attack.py` is a process of its own with lower priority, as a stranger has a machine of his own: it runs the recipes of
`peers.py` (gRPC), `browsers.py` (HTTP) and `fuzz.py`.
"""
