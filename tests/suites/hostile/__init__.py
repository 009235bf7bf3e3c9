"""All attacks that once hurt a server, on servers that ordinary clients use meanwhile.

`__main__.py` starts the servers and runs the bystanders: clients that must get their tokens, and probes of health and
memory. `attack.py` is a process with lower priority, since a real attacker has another machine: it runs the
recipes of `peers.py` (gRPC), `browsers.py` (HTTP) and `fuzz.py`.
"""
